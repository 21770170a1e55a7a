"""The recurrent block of Griffin: a short causal convolution, then the real-gated linear recurrent unit (RG-LRU).

Source: De et al., Griffin: Mixing Gated Linear Recurrences with Local Attention, 2024, sections 2.3 and 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchplug import VllmConfig
from torchplug.interfaces import MambaCopySpec
from torchplug.layers import ColumnParallelLinear, RecurrentLayer, RowParallelLinear, get_act_fn, get_forward_context

RECURRENCE_SCALE = 8.0
"""The constant c of equation 6."""


def state_shapes(vllm_config: VllmConfig) -> tuple[tuple[int, int], tuple[int]]:
    """One layer's state: the convolution's last inputs [conv1d_width - 1 + draft tokens, lru_width / tp], then the
    recurrence's h, [lru_width / tp]. The layer and the class-phase hook both take them from here."""
    config = vllm_config.model_config.hf_config
    ranks = vllm_config.parallel_config.tensor_parallel_size
    speculative = vllm_config.speculative_config
    width, rest = divmod(config.lru_width or config.hidden_size, ranks)
    if rest:
        raise ValueError(f"lru_width {width * ranks + rest} cannot be shared evenly by {ranks} ranks")
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    return (config.conv1d_width - 1 + drafts, width), (width,)


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
    """Inputs are kept as they came, h in float32, in which it is summed."""
    return vllm_config.model_config.dtype, torch.float32


def copy_inputs(state: Tensor, block_ids: list[int], cur_block_idx: int, num_accepted_tokens: int) -> MambaCopySpec:
    """Of the convolution's inputs: every accepted draft moves their window one row on."""
    rows = state[block_ids[cur_block_idx], num_accepted_tokens - 1 :]
    return MambaCopySpec(rows.data_ptr(), rows.numel())


def copy_h(state: Tensor, block_ids: list[int], cur_block_idx: int, num_accepted_tokens: int) -> MambaCopySpec:
    """Of h: each token of a step with drafts leaves its own in a block of its own."""
    block = state[block_ids[cur_block_idx + num_accepted_tokens - 1]]
    return MambaCopySpec(block.data_ptr(), block.numel())


@dataclass(frozen=True)
class Step:
    """Where the requests of a step lie in its flat batch of n tokens.

    Attributes:
        first: int64 [requests], each one's first token.
        last: int64 [requests], each one's last token.
        request: int64 [n], whose token it is.
        age: int64 [n, 1], tokens of the same request before it in this step.
        longest: Tokens of the request that has most.
        continued: bool [requests], whether it has tokens before this step.
        slots: int64 [requests], where its state is; None where no state is kept.
        padded: Whether some slots are -1: nothing is kept of these.
    """

    first: Tensor
    last: Tensor
    request: Tensor
    age: Tensor
    longest: int
    continued: Tensor
    slots: Tensor | None = None
    padded: bool = False

    @classmethod
    def of(cls, num_tokens: int, device: torch.device, *, kept: bool) -> Step:
        """The step in progress; `kept`: the layer has been given a state."""
        context = get_forward_context()
        if context is None:  # one sequence from its beginning
            ends = torch.tensor([0, num_tokens], device=device)
            continued, longest, slots, padded = ends[:1] > 0, num_tokens, None, False
        else:
            ends = context.query_start_loc.long()
            continued = context.seq_lens > ends.diff()
            longest = max(context.query_lens_host)
            slots = context.state_slots if kept else None
            padded = kept and min(context.state_slots_host) < 0
            if padded:
                continued = continued & (slots >= 0)
        lengths = ends.diff()
        request = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths, output_size=num_tokens)
        age = torch.arange(num_tokens, device=device) - ends[request]
        return cls(ends[:-1], ends[1:] - 1, request, age.unsqueeze(1), longest, continued, slots, padded)

    def read(self, state: Tensor | None, like: Tensor) -> Tensor:
        """What a request's last step left, zero for a new one. What a slot held before that may be NaN."""
        if state is None or self.slots is None:
            return like.new_zeros(len(self.first), *like.shape)
        found = state[self.slots.clamp(min=0)]
        return torch.where(self.continued.view(-1, *[1] * (found.dim() - 1)), found, 0)

    def write(self, state: Tensor | None, values: Tensor) -> None:
        """Leave values [requests, ...] for the requests' next step."""
        if state is None or self.slots is None:
            return
        slots = self.slots
        if self.padded:
            values, slots = values[slots >= 0], slots[slots >= 0]
        state[slots] = values.to(state.dtype)


class DepthwiseConv(nn.Module):
    """A filter of `kernel_size` taps for each channel, over a token and those before it."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False)

    def forward(self, x: Tensor, state: Tensor | None, step: Step) -> Tensor:
        """x: [n, channels]; state: [slots, kernel_size - 1 or more, channels]."""
        past = self.weight.shape[2] - 1
        state = None if state is None else state[:, :past]
        # All requests in one row: the inputs before the step, then those of the step.
        row = x.new_empty(len(x) + past * len(step.first), x.shape[1])
        places = torch.arange(len(x), device=x.device) + past * (step.request + 1)
        before = torch.arange(-past, 0, device=x.device)
        row[places] = x
        row[(places[step.first].unsqueeze(1) + before).flatten()] = step.read(state, x[:1].expand(past, -1)).flatten(
            0, 1
        )
        out = self.bias.expand_as(x).clone()
        for tap, filters in enumerate(self.weight[:, 0].unbind(-1)):
            out += filters * row[places - past + tap]
        step.write(state, row[places[step.last].unsqueeze(1) + before + 1])
        return out


class RGLRU(nn.Module):
    """h_t = a_t * h_{t-1} + sqrt(1 - a_t^2) * (i_t * x_t), with a_t = exp(-8 * r_t * softplus(recurrent_param)) and
    gates r and i that are sigmoids of x, linear within each of `num_blocks` blocks of channels."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        size = width // num_blocks

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape), requires_grad=False)

        self.recurrent_param = parameter(width)
        self.input_gate_weight = parameter(num_blocks, size, size)
        self.input_gate_bias = parameter(num_blocks, size)
        self.recurrent_gate_weight = parameter(num_blocks, size, size)
        self.recurrent_gate_bias = parameter(num_blocks, size)

    def forward(self, x: Tensor, state: Tensor | None, step: Step) -> Tensor:
        """x: [n, width]; state: [slots, width], float32."""
        blocks = x.view(len(x), *self.input_gate_bias.shape).transpose(0, 1)

        def gate(weight: Tensor, bias: Tensor) -> Tensor:
            return torch.sigmoid(torch.baddbmm(bias.unsqueeze(1), blocks, weight)).transpose(0, 1).reshape(x.shape)

        input_gate = gate(self.input_gate_weight, self.input_gate_bias)
        recurrent_gate = gate(self.recurrent_gate_weight, self.recurrent_gate_bias)
        log_a = -RECURRENCE_SCALE * recurrent_gate * F.softplus(self.recurrent_param)
        begins = (step.age == 0) & ~step.continued[step.request].unsqueeze(1)
        scale = torch.where(begins, 1.0, torch.sqrt(1 - torch.exp(2 * log_a)))
        h = (x * input_gate * scale.to(x.dtype)).float()
        a = torch.exp(log_a).float()
        h[step.first] += a[step.first] * step.read(state, h[0])
        h = scan(a, h, step)
        step.write(state, h[step.last])
        return h.to(x.dtype)


def scan(a: Tensor, x: Tensor, step: Step) -> Tensor:
    """h_t = a_t * h_{t-1} + x_t along each request, all requests at once, in log2(longest request) passes.

    After the pass over distance d, h_t holds the part of the sum that its last 2d tokens give, a_t the product of as
    many factors (Hillis and Steele, Data Parallel Algorithms, 1986). a, x: float32 [n, width].
    """
    distance = 1
    while distance < step.longest:
        own = step.age[distance:] >= distance
        reached = torch.where(own, x[distance:] + a[distance:] * x[:-distance], x[distance:])
        factors = torch.where(own, a[distance:] * a[:-distance], a[distance:])
        x, a = torch.cat((x[:distance], reached)), torch.cat((a[:distance], factors))
        distance *= 2
    return x


class RecurrentBlock(RecurrentLayer):
    """linear_out(RG-LRU(conv(linear_x(x))) * act(linear_y(x))): the mixer of a recurrent layer.

    The state is `state_shapes`: the convolution's inputs, then h.
    """

    def __init__(self, config: Any, vllm_config: VllmConfig) -> None:
        super().__init__()
        width = config.lru_width or config.hidden_size
        if width % config.num_attention_heads:
            raise ValueError(
                f"config.json: lru_width {width} is not a multiple of num_attention_heads {config.num_attention_heads}"
            )
        self._shapes, self._dtypes = state_shapes(vllm_config), state_dtypes(vllm_config)
        self.linear_y = ColumnParallelLinear(config.hidden_size, width, bias=True)
        self.linear_x = ColumnParallelLinear(config.hidden_size, width, bias=True)
        self.linear_out = RowParallelLinear(width, config.hidden_size, bias=True)
        self.conv_1d = DepthwiseConv(width, config.conv1d_width)
        self.rg_lru = RGLRU(width, config.num_attention_heads)
        self.act = get_act_fn(config.hidden_activation)

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self._shapes

    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        return self._dtypes

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [n, hidden_size]."""
        step = Step.of(len(hidden_states), hidden_states.device, kept=self.state is not None)
        inputs, h = (None, None) if self.state is None else self.state
        x = self.rg_lru(self.conv_1d(self.linear_x(hidden_states), inputs, step), h, step)
        return self.linear_out(x * self.act(self.linear_y(hidden_states)))
