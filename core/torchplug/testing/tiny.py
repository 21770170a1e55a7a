"""A tiny random checkpoint in memory: what a class's checks load when there is no checkpoint on disk.

Weights have a standard deviation of 2 / sqrt(fan-in): at the usual 0.02 a model hardly depends on its attention, and a
fault does not show. They are exact in bfloat16, so that a bfloat16 model differs only by what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchplug.errors import CheckpointError, Problem
from torchplug.host.checkpoint import Checkpoint, TensorInfo
from torchplug.layers.weights import CheckpointPart


class TinyCheckpoint(Checkpoint):
    """A checkpoint that holds `tensors` (float32 on the CPU) under their checkpoint names; it has no tokenizer."""

    def __init__(self, config: Mapping[str, Any], source: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = source
        self.path = Path(source)
        self.config = dict(config)
        self.config_source = source
        self.generation_config = {}
        self.chat_template = None
        self.special_tokens = {}
        self.add_bos_token = None
        self._tensors = dict(tensors)

    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), self.path, t.nbytes)
            for name, t in self._tensors.items()
        }

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

    def tokenizer(self) -> Any:
        raise CheckpointError(f"checkpoint {self.name!r}", Problem("", "has no tokenizer", "give token ids"))


def random_tensors(shapes: Mapping[str, Sequence[int] | Tensor], seed: int = 0) -> dict[str, Tensor]:
    """A random tensor for each shape; a tensor given in place of a shape is kept.

    Biases (by name) are small, other vectors are near 1 as norms' weights are, matrices have fan-in scaling.
    """
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if isinstance(shape, Tensor):
            made[name] = shape
            continue
        tensor = torch.empty(tuple(shape), dtype=torch.float32)
        if name.endswith("bias"):
            tensor.normal_(0, 0.15, generator=generator)
        elif tensor.dim() < 2:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0, 2 / prod(shape[1:]) ** 0.5, generator=generator)
        made[name] = tensor.bfloat16().float()
    return made


def checkpoint_shapes(module: nn.Module, packed: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a checkpoint, as far as the module itself can tell them.

    They are those of its parameters, a tied one under its first name. A fused parameter that `packed` names is taken
    apart, as in a checkpoint, where its layer has `out_features_list`; one whose layer has `checkpoint_spellings` in
    the first of them.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        path, _, kind = name.rpartition(".")
        above, _, layer = path.rpartition(".")
        parts = packed.get(layer, ())
        owner = module.get_submodule(path)
        sizes = getattr(owner, "out_features_list", ()) if parts else ()
        spelled: Mapping[str, CheckpointPart] = {}
        if hasattr(type(owner), "checkpoint_spellings"):
            spelled = owner.checkpoint_spellings()[0]  # type: ignore[operator]
        if own := {part: piece.shape for part, piece in spelled.items() if piece.parameter == kind}:
            shapes |= {f"{path}.{part}".lstrip("."): shape for part, shape in own.items()}
        elif parts and len(parts) == len(sizes):
            for part, size in zip(parts, sizes, strict=True):
                shapes[".".join(filter(None, (above, part, kind)))] = (size, *parameter.shape[1:])
        else:
            shapes[name] = tuple(parameter.shape)
    return shapes
