"""Root-mean-square layer normalisation, with the residual addition that comes before it in a pre-norm block."""

from __future__ import annotations

from typing import overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.layers.cpu import kernels
from torchplug.layers.cpu.kernels import Normalise


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.

    `norm(x)` gives the normalised x. `norm(x, residual)` gives `(norm(x + residual), x + residual)`, the form in which
    a pre-norm block hands its stream from one sublayer to the next. Shapes [..., hidden_size], results in x's dtype.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, equation 4.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps
        self._shape = (hidden_size,)
        self._native: Normalise | None = None

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self._native is not None:
            found = self._native(x, self._parameters["weight"], residual, self.eps)  # type: ignore[arg-type]
            if found is not None:
                return found[0] if residual is None else found
        if residual is None:
            return F.rms_norm(x, self._shape, self.weight, self.eps)
        x = x + residual
        return F.rms_norm(x, self._shape, self.weight, self.eps), x

    def process_weights_after_loading(self) -> None:
        """Choose how to compute here; called once by the loader."""
        self._native = kernels.rms_norm(self.weight)

    def extra_repr(self) -> str:
        return f"{self._shape[0]}, eps={self.eps}"
