"""Plays the runner for recurrent layers: state tensors, slots, and one ForwardContext per step, by hand.

What no request of the step owns is NaN and must stay bit for bit what it was; `step` checks that each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchplug.forward_context import ForwardContext, set_forward_context
from torchplug.layers import RecurrentLayer

PADDING = -1


@dataclass(frozen=True)
class Part:
    """Tokens [start, stop) of `tokens` in one step, for the request in `slot`."""

    slot: int
    tokens: Sequence[int] | Tensor
    start: int
    stop: int


def context_of(parts: Sequence[Part]) -> ForwardContext:
    """The layout of a step; a part of the slot PADDING is a padding row."""
    lengths = [part.stop - part.start for part in parts]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    slots = [part.slot for part in parts]
    nothing = torch.zeros(0, dtype=torch.int64)
    return ForwardContext(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([part.stop for part in parts], dtype=torch.int32),
        slot_mapping=nothing,
        block_tables=nothing.view(0, 0),
        block_size=16,
        query_lens_host=tuple(lengths),
        seq_lens_host=tuple(part.stop for part in parts),
        block_tables_host=(),
        state_slots=torch.tensor(slots),
        state_slots_host=tuple(slots),
    )


class States:
    """The states of every recurrent layer of `module`, in `num_slots` slots full of NaN."""

    def __init__(self, module: nn.Module, num_slots: int = 8) -> None:
        self.module = module
        self.num_slots = num_slots
        self.layers = [layer for layer in module.modules() if isinstance(layer, RecurrentLayer)]
        for layer in self.layers:
            layer.state = tuple(
                torch.full((num_slots, *shape), float("nan"), dtype=dtype)
                for shape, dtype in zip(layer.state_shapes(), layer.state_dtypes(), strict=True)
            )

    def close(self) -> None:
        for layer in self.layers:
            layer.state = None

    def step(self, parts: Sequence[Part]) -> list[Tensor]:
        """One forward over all parts; for each part its rows of logits (or, of a layer, of the result).

        A part's tokens are ids for a model, or rows of hidden states for a layer.
        """
        context = context_of(parts)
        used = {part.slot for part in parts if part.stop > part.start}
        before = [[tensor.clone() for tensor in layer.state] for layer in self.layers]
        with torch.inference_mode(), set_forward_context(context):
            rows = [torch.as_tensor(part.tokens)[part.start : part.stop] for part in parts]
            if isinstance(self.module, RecurrentLayer):
                result = self.module(torch.cat(rows))
            else:
                positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
                result = self.module.compute_logits(self.module(torch.cat(rows), positions))
        idle = [slot for slot in range(self.num_slots) if slot not in used]
        for layer, tensors in zip(self.layers, before, strict=True):
            for now, was in zip(layer.state, tensors, strict=True):
                assert torch.equal(now[idle].nan_to_num(7e7), was[idle].nan_to_num(7e7)), "a slot of nobody's changed"
        return list(result.split([part.stop - part.start for part in parts]))
