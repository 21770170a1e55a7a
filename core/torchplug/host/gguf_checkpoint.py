"""A GGUF file as a checkpoint: config, weights and tokenizer of the Hugging Face model that it was converted from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchplug.errors import CheckpointError, Problem
from torchplug.host.checkpoint import Checkpoint, TensorInfo
from torchplug.host.ggml_types import dequantise, undequantisable
from torchplug.host.gguf_file import GgufFile
from torchplug.host.gguf_models import family_of, hugging_face_names, restore_rows
from torchplug.host.gguf_tokenizer import GgufTokenizer

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from torch import Tensor


class GgufCheckpoint(Checkpoint):
    """See the module and `Checkpoint`."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.config_source = str(path)
        self._file = file = GgufFile(path)
        self._family = family_of(file)
        self.config = self._family.config(file)
        self._tensors = hugging_face_names(file, self._family)
        self.generation_config = _generation_config(file, self.config)
        self.chat_template = file.text("tokenizer.chat_template")
        self._check_vocabulary()

    @cached_property
    def special_tokens(self) -> dict[str, str]:  # type: ignore[override]
        """Computed on first use: it takes decoding the vocabulary."""
        return self.vocabulary.special_tokens if self.vocabulary else {}

    @cached_property
    def add_bos_token(self) -> bool | None:  # type: ignore[override]
        """Computed on first use, as `special_tokens`."""
        return self.vocabulary.add_bos if self.vocabulary else None

    def tensors(self) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(name, tensor.shape, tensor.kind.plain or tensor.kind.name, self.path, tensor.nbytes)
            for name, tensor in self._tensors.items()
        }

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        import torch

        problems = undequantisable({tensor.kind for tensor in self._tensors.values()}, str(self.path))
        if problems:
            raise CheckpointError(f"checkpoint {self.name!r}", problems)
        for name, tensor in self._tensors.items():
            values = dequantise(self._file.raw(tensor), tensor.kind, tensor.shape, dtype or torch.float32)
            yield name, restore_rows(tensor.name, values, self._family, self.config)

    @property
    def total_bytes(self) -> int:
        return sum(4 * math.prod(tensor.shape) for tensor in self._tensors.values())

    def tokenizer(self) -> Tokenizer:
        return (self.vocabulary or GgufTokenizer(self._file)).build()

    @cached_property
    def vocabulary(self) -> GgufTokenizer | None:
        """None where the file says nothing of tokens: a model without a tokenizer can still be run on token ids."""
        return GgufTokenizer(self._file) if self._file.text("tokenizer.ggml.model") not in (None, "none") else None

    def _check_vocabulary(self) -> None:
        tokens, rows = self._file.count("tokenizer.ggml.tokens") or 0, self.config["vocab_size"]
        if tokens > rows:
            says = f"has {tokens:,} tokens, but an embedding of {rows:,} rows"
            fix = "the file is damaged, or was made by a faulty tool: convert the model to GGUF again"
            raise CheckpointError(f"GGUF file {str(self.path)!r}", Problem("tokenizer", says, fix))


def _generation_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """bos, pad and every id that ends a turn or a text."""
    found: dict[str, Any] = {key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config}
    ends: list[int] = []
    for key in ("eos", "eot", "eom"):
        token = file.integer(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token not in ends:
            ends.append(token)
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found
