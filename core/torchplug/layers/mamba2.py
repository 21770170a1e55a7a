"""The Mamba-2 mixer: projection, convolution, state-space scan with one decay per head, gated norm, projection.

Source: Dao and Gu, Transformers are SSMs, 2024, section 7.1; weight names as in transformers' Mamba2ForCausalLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.layers.conv import CausalConv1d
from torchplug.layers.cpu import state_space
from torchplug.layers.gated_norm import GatedRMSNorm
from torchplug.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from torchplug.layers.recurrent import RecurrentLayer
from torchplug.layers.ssd import ssd_scan, ssd_update
from torchplug.layers.state_shapes import StateSettings, mamba2_state_shapes
from torchplug.layers.state_step import StateStep, state_step


class MambaMixer2(RecurrentLayer):
    """What Mamba-2 has in place of attention.

    Args:
        hidden_size: Size of the input and of the result.
        intermediate_size: num_heads * head_dim.
        num_heads: Heads of the scan.
        head_dim: Size of one head.
        state_size: Size of the state of one channel.
        n_groups: Groups of heads that share B and C; a divisor of num_heads.
        conv_kernel: Taps of the convolution.
        settings: Dtypes and ranks of the state.
        use_bias: Whether the projections have biases.
        use_conv_bias: Whether the convolution has.
        activation: Of the convolution's result.
        norm_eps: Of the gated norm.
        norm_groups: Parts of the gated norm.
        time_step_limit: Least and greatest step, after softplus.

    The state is (convolution [conv_kernel - 1 + num_spec, intermediate + 2 * n_groups * state], state space [num_heads,
    head_dim, state]). The scan is in float32. `forward` takes and gives [num_tokens, hidden_size].
    """

    _decay: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        n_groups: int = 1,
        conv_kernel: int = 4,
        settings: StateSettings,
        use_bias: bool = False,
        use_conv_bias: bool = True,
        activation: Callable[[Tensor], Tensor] = F.silu,
        norm_eps: float = 1e-5,
        norm_groups: int = 1,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        super().__init__()
        if num_heads * head_dim != intermediate_size:
            raise ValueError(
                f"MambaMixer2: {num_heads} heads of size {head_dim} do not make up {intermediate_size} channels"
            )
        self._settings = settings
        self._shapes = mamba2_state_shapes(
            settings,
            intermediate_size=intermediate_size,
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=state_size,
            n_groups=n_groups,
            conv_kernel=conv_kernel,
        )
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.state_size = state_size
        self.n_groups = n_groups
        self._limit = time_step_limit
        shared = n_groups * state_size
        self._widths = [intermediate_size, intermediate_size + 2 * shared, num_heads]
        self._conv_widths = [intermediate_size, shared, shared]
        self.in_proj = MergedColumnParallelLinear(
            hidden_size, (intermediate_size, intermediate_size, shared, shared, num_heads), use_bias
        )
        self.conv1d = CausalConv1d(intermediate_size + 2 * shared, conv_kernel, use_conv_bias, activation)
        self.dt_bias = nn.Parameter(torch.empty(num_heads, dtype=torch.float32), requires_grad=False)
        self.A_log = nn.Parameter(torch.empty(num_heads, dtype=torch.float32), requires_grad=False)
        self.D = nn.Parameter(torch.empty(num_heads, dtype=torch.float32), requires_grad=False)
        self.norm = GatedRMSNorm(intermediate_size, norm_eps, norm_groups)
        self.out_proj = RowParallelLinear(intermediate_size, hidden_size, use_bias)
        self.register_buffer("_decay", None, persistent=False)
        self._native: state_space.SsdScan | None = None

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self._shapes

    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        return self._settings.dtypes

    def process_weights_after_loading(self) -> None:
        """Take the decay rates out of the logarithm in which they are stored, and choose what scans here."""
        self._decay = -self.A_log.float().exp()
        self._native = state_space.ssd_scan(
            self._decay,
            self.dt_bias,
            self.D,
            head_dim=self.head_dim,
            size=self.state_size,
            groups=self.n_groups,
            limit=self._limit,
            dtype=self.conv1d.weight.dtype,
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        step = state_step(hidden_states)
        if step.num_tokens == 0:
            return torch.empty_like(hidden_states)
        conv_state, ssm_state = (None, None) if self.state is None else self.state
        gate, xbc, dt = torch.split(self.in_proj(hidden_states), self._widths, dim=-1)
        xbc = self.conv1d(xbc, conv_state, step)
        out = None
        if self._native is not None and step.native is not None:
            out = self._native(xbc, dt, ssm_state, step.native)
        if out is None:
            out = self._scan(xbc, dt, ssm_state, step)
        result: Tensor = self.out_proj(self.norm(out, gate))
        return result

    def _scan(self, xbc: Tensor, dt: Tensor, ssm_state: Tensor | None, step: StateStep) -> Tensor:
        x, b, c = torch.split(xbc.float(), self._conv_widths, dim=-1)
        x = x.reshape(-1, self.num_heads, self.head_dim)
        b = b.reshape(-1, self.n_groups, self.state_size)
        c = c.reshape(-1, self.n_groups, self.state_size)
        dt = F.softplus(dt.float() + self.dt_bias)
        if self._limit != (0.0, math.inf):
            dt = dt.clamp(*self._limit)
        decay = -self.A_log.float().exp() if self._decay is None else self._decay
        shape = (self.num_heads, self.head_dim, self.state_size)
        decoded = scanned = None
        if (part := step.decode) is not None:
            state = part.slots.read(ssm_state, shape, torch.float32, x.device)
            decoded = ssd_update(
                part.tokens.of(x), part.tokens.of(dt), decay, part.tokens.of(b), part.tokens.of(c), state
            )
            part.slots.write(ssm_state, state)
        if (part := step.prefill) is not None:
            state = part.slots.read(ssm_state, shape, torch.float32, x.device)
            scanned, state = ssd_scan(
                part.tokens.of(x), part.tokens.of(dt), decay, part.tokens.of(b), part.tokens.of(c), state, part
            )
            part.slots.write(ssm_state, state)
        return step.join(decoded, scanned).addcmul_(x, self.D.float().unsqueeze(-1)).flatten(-2)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, state_size={self.state_size}, "
            f"n_groups={self.n_groups}"
        )
