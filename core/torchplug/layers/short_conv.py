"""The short convolution of LFM2: a gate before and a gate after a convolution over a few tokens.

Source: Liquid AI, LFM2 Technical Report, 2025, section 2 (the gated short convolution block); weight names as in
transformers' Lfm2ForCausalLM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchplug.layers.conv import CausalConv1d
from torchplug.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from torchplug.layers.recurrent import RecurrentLayer
from torchplug.layers.state_shapes import StateSettings, short_conv_state_shapes
from torchplug.layers.state_step import state_step


class ShortConv(RecurrentLayer):
    """`out_proj(c * conv(b * x))`, where b, c and x are the thirds of one projection of the input.

    Args:
        hidden_size: Size of the input, of the channels and of the result.
        conv_kernel: Taps of the convolution.
        settings: Dtype and ranks of the state.
        bias: Whether projections and convolution have biases.

    The state is the convolution's, [conv_kernel - 1 + num_spec, hidden_size]. `forward` takes and gives [num_tokens,
    hidden_size].
    """

    def __init__(self, hidden_size: int, conv_kernel: int, *, settings: StateSettings, bias: bool = False) -> None:
        super().__init__()
        self._settings = settings
        self._shapes = short_conv_state_shapes(settings, hidden_size=hidden_size, conv_kernel=conv_kernel)
        self.in_proj = MergedColumnParallelLinear(hidden_size, (hidden_size,) * 3, bias)
        self.conv = CausalConv1d(hidden_size, conv_kernel, bias, activation=None)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self._shapes

    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        return (self._settings.conv_dtype,)

    def forward(self, hidden_states: Tensor) -> Tensor:
        step = state_step(hidden_states)
        if step.num_tokens == 0:
            return torch.empty_like(hidden_states)
        b, c, x = self.in_proj(hidden_states).chunk(3, dim=-1)
        (state,) = (None,) if self.state is None else self.state
        result: Tensor = self.out_proj(c * self.conv(b * x, state, step))
        return result
