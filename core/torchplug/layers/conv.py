"""Causal depthwise convolution along each request's tokens, continued from the inputs that it saw last.

Every channel has its own filter of a few taps: out[t] = bias + sum over j of tap[j] * x[t - k + 1 + j]. The state is
the last k - 1 inputs of a request, in the order of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.layers.cpu import state_space
from torchplug.layers.state_step import Sequences, StateStep


class CausalConv1d(nn.Module):
    """The convolution of Mamba and its kin, with an activation.

    Args:
        channels: Size of the last dimension.
        kernel_size: Taps per channel, 1 or more.
        bias: Whether there is a bias.
        activation: Of the result; None for none.

    `weight` is [channels, 1, kernel_size], as PyTorch's Conv1d with one group per channel keeps it. Sums are taken in
    float32.
    """

    bias: nn.Parameter | None
    _taps: Tensor | None
    _offset: Tensor | None

    def __init__(
        self, channels: int, kernel_size: int, bias: bool = True, activation: Callable[[Tensor], Tensor] | None = F.silu
    ) -> None:
        super().__init__()
        self.channels = channels
        self.kernel_size = kernel_size
        self.activation = activation
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None
        self.register_buffer("_taps", None, persistent=False)
        self.register_buffer("_offset", None, persistent=False)
        self._native: state_space.CausalConv | None = None

    def process_weights_after_loading(self) -> None:
        """Lay the filters out tap by tap, in the float32 that sums are taken in."""
        self._taps, self._offset = self._laid_out()
        self._native = state_space.causal_conv(self._taps, self._offset, self.activation, self.weight.dtype)

    def forward(self, x: Tensor, state: Tensor | None, step: StateStep) -> Tensor:
        """Convolve the step's tokens and leave each request's last inputs in its slot.

        Args:
            x: [num_tokens, channels].
            state: [num_slots, at least kernel_size - 1, channels], of which the first kernel_size - 1 rows are used;
                None where nothing is kept.
            step: The plan of the step.

        Returns [num_tokens, channels] in x's dtype.
        """
        if self._native is not None and step.native is not None:
            out = self._native(x, state, step.native)
            if out is not None:
                return out
        taps, offset = (self._taps, self._offset) if self._taps is not None else self._laid_out()
        assert taps is not None
        if state is not None:
            state = state[:, : self.kernel_size - 1]
        decode = prefill = None
        if step.decode is not None:
            decode = self._decode(step.decode.tokens.of(x), state, step.decode, taps, offset)
        if step.prefill is not None:
            prefill = self._prefill(step.prefill.tokens.of(x), state, step.prefill, taps, offset)
        return step.join(decode, prefill)

    def _decode(
        self, x: Tensor, state: Tensor | None, requests: Sequences, taps: Tensor, offset: Tensor | None
    ) -> Tensor:
        before = requests.slots.read(state, (self.kernel_size - 1, self.channels), x.dtype, x.device)
        window = torch.cat((before, x.unsqueeze(1)), dim=1)
        out = (window * taps).sum(1)
        requests.slots.write(state, window[:, 1:])
        return self._finish(out, offset, x.dtype)

    def _prefill(
        self, x: Tensor, state: Tensor | None, requests: Sequences, taps: Tensor, offset: Tensor | None
    ) -> Tensor:
        past = self.kernel_size - 1
        before = requests.slots.read(state, (past, self.channels), x.dtype, x.device)
        # One run of rows: each request's last inputs, then its tokens. Sums that reach over into the next request are
        # made and left out.
        pieces = [
            piece
            for pair in zip(before.unbind(0), torch.split(x, list(requests.lengths)), strict=True)
            for piece in pair
        ]
        run = torch.cat(pieces)
        if state is not None:
            stop, last = 0, []
            for length in requests.lengths:
                stop += past + length
                last.append(run[stop - past : stop])
            requests.slots.write(state, torch.stack(last))
        wide = run.float()
        length = len(run) - past
        out = wide[:length] * taps[0]
        for tap in range(1, self.kernel_size):
            out.addcmul_(wide[tap : tap + length], taps[tap])
        out = self._finish(out, offset, x.dtype)
        if len(requests.lengths) == 1:
            return out
        first, kept = 0, []
        for length in requests.lengths:
            kept.append(out[first : first + length])
            first += past + length
        return torch.cat(kept)

    def _finish(self, out: Tensor, offset: Tensor | None, dtype: torch.dtype) -> Tensor:
        if offset is not None:
            out += offset
        return (out if self.activation is None else self.activation(out)).to(dtype)

    def _laid_out(self) -> tuple[Tensor, Tensor | None]:
        """Filters [kernel_size, channels] and biases [channels], float32."""
        taps = self.weight.squeeze(1).t().contiguous().float()
        return taps, None if self.bias is None else self.bias.float()

    def extra_repr(self) -> str:
        return f"{self.channels}, kernel_size={self.kernel_size}, bias={self.bias is not None}"
