"""Activation functions by their names in config.json, alone and in the gated form `act(gate) * up`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.errors import CheckpointError, Problem
from torchplug.layers.cpu import kernels

# transformers' gelu_new, gelu_fast and gelu_pytorch_tanh are one function: the tanh form of Hendrycks and Gimpel,
# Gaussian Error Linear Units, 2016.
_gelu_tanh = partial(F.gelu, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    """The sigmoid form of the same paper, section 2; CLIP and Qwen2-VL's towers have it."""
    return x * (1.702 * x).sigmoid()


_BY_NAME: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
}


def get_act_fn(name: str) -> Callable[[Tensor], Tensor]:
    """The activation that config.json calls `name`. Raises CheckpointError, listing the known names, for another
    one."""
    if name not in _BY_NAME:
        raise CheckpointError(
            "checkpoint config",
            Problem(
                f"activation {name!r}",
                f"is not one of {', '.join(sorted(_BY_NAME))}",
                "use one of these, or write the activation in the model class",
            ),
        )
    return _BY_NAME[name]


class ActAndMul(nn.Module):
    """`act(gate) * up`, where gate and up are the halves of the last dimension, as MergedColumnParallelLinear leaves
    them.

    `forward` takes [..., 2 * n] and gives [..., n].
    """

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act(gate).mul_(up)


class SiluAndMul(ActAndMul):
    """`silu(gate) * up`: the gate of Llama and most models after it. Source: Shazeer, GLU Variants Improve Transformer,
    2020."""

    def __init__(self) -> None:
        super().__init__(F.silu)

    def forward(self, gate_up: Tensor) -> Tensor:
        native = kernels.silu_and_mul(gate_up)
        return super().forward(gate_up) if native is None else native


def get_act_and_mul(name: str) -> ActAndMul:
    """The gated form of the activation that config.json calls `name`. Raises CheckpointError as `get_act_fn` does."""
    act = get_act_fn(name)
    return SiluAndMul() if act is F.silu else ActAndMul(act)
