"""The Mamba-1 mixer: projection, convolution, selective scan, gate, projection.

Source: Gu and Dao, Mamba, 2023, section 3.4 and figure 3; weight names as in transformers' MambaForCausalLM.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.layers.conv import CausalConv1d
from torchplug.layers.cpu import state_space
from torchplug.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from torchplug.layers.norm import RMSNorm
from torchplug.layers.recurrent import RecurrentLayer
from torchplug.layers.selective_scan import selective_scan, selective_update
from torchplug.layers.state_shapes import StateSettings, mamba1_state_shapes
from torchplug.layers.state_step import StateStep, state_step


class MambaMixer(RecurrentLayer):
    """What Mamba has in place of attention.

    Args:
        hidden_size: Size of the input and of the result.
        intermediate_size: Channels of the scan.
        state_size: Size of the state of one channel.
        time_step_rank: Size of what the steps of all channels are projected from.
        conv_kernel: Taps of the convolution.
        settings: Dtypes and ranks of the state.
        use_bias: Whether the outer projections have biases.
        use_conv_bias: Whether the convolution has.
        activation: Of the convolution's result; the gate's is always silu.
        norm_eps: Normalise the time step, b and c before they are used (RMS, as FalconMamba and Jamba do), with this
            added to the mean squares; None for not.
        norm_weights: Whether these three norms have weights.

    The state is (convolution [conv_kernel - 1, intermediate], state space [intermediate, state]). The scan is in
    float32. `forward` takes and gives [num_tokens, hidden_size].
    """

    _decay: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        state_size: int,
        time_step_rank: int,
        conv_kernel: int = 4,
        settings: StateSettings,
        use_bias: bool = False,
        use_conv_bias: bool = True,
        activation: Callable[[Tensor], Tensor] = F.silu,
        norm_eps: float | None = None,
        norm_weights: bool = False,
    ) -> None:
        super().__init__()
        self._settings = settings
        self._shapes = mamba1_state_shapes(
            settings, intermediate_size=intermediate_size, state_size=state_size, conv_kernel=conv_kernel
        )
        self.intermediate_size = intermediate_size
        self.state_size = state_size
        self._widths = [time_step_rank, state_size, state_size]
        self.in_proj = MergedColumnParallelLinear(hidden_size, (intermediate_size, intermediate_size), use_bias)
        self.conv1d = CausalConv1d(intermediate_size, conv_kernel, use_conv_bias, activation)
        self.x_proj = RowParallelLinear(intermediate_size, sum(self._widths))
        self.dt_proj = _StepProjection(time_step_rank, intermediate_size)
        self.A_log = nn.Parameter(torch.empty(intermediate_size, state_size, dtype=torch.float32), requires_grad=False)
        self.D = nn.Parameter(torch.empty(intermediate_size, dtype=torch.float32), requires_grad=False)
        self.norm_eps = norm_eps
        if norm_weights and norm_eps is not None:
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = (RMSNorm(width, norm_eps) for width in self._widths)
        self.norm_weights = norm_weights
        self.out_proj = RowParallelLinear(intermediate_size, hidden_size, use_bias)
        self.register_buffer("_decay", None, persistent=False)
        self._native: state_space.SelectiveScan | None = None

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self._shapes

    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        return self._settings.dtypes

    def process_weights_after_loading(self) -> None:
        """Take the decay rates out of the logarithm in which they are stored, and choose what scans here."""
        self._decay = -self.A_log.float().exp()
        self._native = state_space.selective_scan(self._decay, self.dt_proj.bias, self.D, self.conv1d.weight.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        step = state_step(hidden_states)
        if step.num_tokens == 0:
            return torch.empty_like(hidden_states)
        conv_state, ssm_state = (None, None) if self.state is None else self.state
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        x = self.conv1d(x, conv_state, step)
        dt, bc = self._steps_and_keys(self.x_proj(x))
        out = None
        if self._native is not None and step.native is not None:
            out = self._native(x, dt, gate, bc, ssm_state, step.native)
        if out is None:
            out = self._scan(x, dt, gate, bc, ssm_state, step)
        result: Tensor = self.out_proj(out)
        return result

    def _steps_and_keys(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """What the channels' steps are before bias and softplus, [tokens, intermediate], and b and c side by side."""
        rank = self._widths[0]
        if self.norm_eps is None:
            return self.dt_proj(projected[:, :rank]), projected[:, rank:]
        parts = torch.split(projected, self._widths, dim=-1)
        if self.norm_weights:
            norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
            dt, b, c = (norm(part) for norm, part in zip(norms, parts, strict=True))
        else:
            dt, b, c = (F.rms_norm(part, part.shape[-1:], None, self.norm_eps) for part in parts)
        return self.dt_proj(dt), torch.cat((b, c), dim=-1)

    def _scan(
        self, x: Tensor, dt: Tensor, gate: Tensor, bc: Tensor, ssm_state: Tensor | None, step: StateStep
    ) -> Tensor:
        dtype = x.dtype
        dt = F.softplus(dt.float() + self.dt_proj.bias)
        x = x.float()
        b, c = bc.float().chunk(2, dim=-1)
        decay = -self.A_log.float().exp() if self._decay is None else self._decay
        shape = (self.intermediate_size, self.state_size)
        decoded = scanned = None
        if (part := step.decode) is not None:
            state = part.slots.read(ssm_state, shape, torch.float32, x.device)
            decoded = selective_update(
                part.tokens.of(x), part.tokens.of(dt), decay, part.tokens.of(b), part.tokens.of(c), state
            )
            part.slots.write(ssm_state, state)
        if (part := step.prefill) is not None:
            state = part.slots.read(ssm_state, shape, torch.float32, x.device)
            scanned, state = selective_scan(
                part.tokens.of(x), part.tokens.of(dt), decay, part.tokens.of(b), part.tokens.of(c), state, part
            )
            part.slots.write(ssm_state, state)
        out = step.join(decoded, scanned).addcmul_(x, self.D.float())
        return out.mul_(F.silu(gate.float())).to(dtype)

    def extra_repr(self) -> str:
        return f"intermediate_size={self.intermediate_size}, state_size={self.state_size}"


class _StepProjection(ColumnParallelLinear):
    """The projection to the channels' steps without its bias, which is far greater than the rest and is added in
    float32."""

    bias: nn.Parameter

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x, self.weight, None)
