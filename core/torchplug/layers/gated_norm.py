"""The norm between Mamba-2's scan and its output projection: a gate and an RMS norm over groups of channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.layers.cpu import state_space


class GatedRMSNorm(nn.Module):
    """`rms_norm(x * silu(gate)) * weight`, the norm over each group of channels, in float32.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
        groups: Parts of equal size that are normalised each on its own; with more than one rank a part never spans
            two.

    `forward` takes x and gate [..., hidden_size] and gives the same shape in the gate's dtype. Source: Dao and Gu,
    Transformers are SSMs, 2024, section 7.1, with the gate first, as in the authors' code.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, groups: int = 1) -> None:
        super().__init__()
        if hidden_size % groups:
            raise ValueError(f"GatedRMSNorm: {hidden_size} channels cannot be split into {groups} groups evenly")
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps
        self.groups = groups
        self._native: state_space.GatedNorm | None = None

    def process_weights_after_loading(self) -> None:
        """Choose what computes here."""
        self._native = state_space.gated_rms_norm(self.weight, self.eps, self.groups)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if self._native is not None:
            out = self._native(x, gate, self.weight)
            if out is not None:
                return out
        gated = F.silu(gate.float()).mul_(x)
        size = gated.shape[-1] // self.groups
        normed = F.rms_norm(gated.view(*gated.shape[:-1], self.groups, size), (size,), None, self.eps).flatten(-2)
        return normed.to(gate.dtype).mul_(self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, groups={self.groups}"
