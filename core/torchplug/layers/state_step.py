"""The plan of a step for recurrent layers: which tokens belong to which request, and which slots hold their states.

A step mixes requests that bring one token with requests that bring several. The first kind is computed for all of them
in one call; the second goes through convolution and scan in a form that runs along the tokens. The plan is made once
per context, by the first layer that asks, and shared by all others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from torchplug.forward_context import ForwardContext, get_forward_context
from torchplug.layers.cpu import state_space


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of some requests of a step, in order.

    Attributes:
        count: How many requests.
        first: The first slot, where they are consecutive; else None.
        rows: int64 [count], where they are not; a padding row names slot 0 and is in `fresh`.
        fresh: True where all requests start from zero, None where none does, else bool [count].
        kept: int64, the requests that have a slot, where not all do.
        kept_rows: int64, their slots.
    """

    count: int
    first: int | None = None
    rows: Tensor | None = None
    fresh: Tensor | bool | None = None
    kept: Tensor | None = None
    kept_rows: Tensor | None = None

    def read(self, state: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The states before the step: [count, *shape] in `dtype`, zero for a request's first tokens.

        Where slots are consecutive and of this dtype it is a view: what is written to it is in `state`.
        """
        if state is None or self.fresh is True:
            return torch.zeros((self.count, *shape), dtype=dtype, device=device)
        if self.first is not None:
            before = state.narrow(0, self.first, self.count)
        else:
            assert self.rows is not None
            before = state.index_select(0, self.rows)
        before = before.to(dtype)
        if self.fresh is not None:
            # Not a product: whoever had the slot before may have left a NaN in it.
            assert isinstance(self.fresh, Tensor)
            before.masked_fill_(self.fresh.view(-1, *(1,) * len(shape)), 0)
        return before

    def write(self, state: Tensor | None, after: Tensor) -> None:
        """Leave `after` [count, *shape] in the slots."""
        if state is None:
            return
        if self.first is not None:
            target = state.narrow(0, self.first, self.count)
            if target.data_ptr() != after.data_ptr() or target.dtype != after.dtype:
                target.copy_(after)
        elif self.kept is not None:
            assert self.kept_rows is not None
            state.index_copy_(0, self.kept_rows, after.index_select(0, self.kept).to(state.dtype))
        else:
            assert self.rows is not None
            state.index_copy_(0, self.rows, after.to(state.dtype))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Places of some tokens in the flat batch: `count` from `first` on, or `rows`, int64 [count]."""

    count: int
    first: int = 0
    rows: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """Their rows of `x` [num_tokens, ...]: [count, ...], a view where they are consecutive."""
        return x.narrow(0, self.first, self.count) if self.rows is None else x.index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class Sequences:
    """The requests of a step with one token each, or those with several, and their places.

    Attributes:
        tokens: Of the flat batch, one request after another.
        lengths: New tokens of each request.
        slots: Where their states are.
    """

    tokens: Tokens
    lengths: tuple[int, ...]
    slots: Slots


@dataclass(frozen=True, slots=True)
class StateStep:
    """What every recurrent layer does in this step; either part is None where the step has no such request,
    both in a step without tokens. `native` is the step as kernels read it, None where there are none."""

    num_tokens: int
    decode: Sequences | None
    prefill: Sequences | None
    native: state_space.StepRequests | None = None

    def join(self, decode: Tensor | None, prefill: Tensor | None) -> Tensor:
        """Rows of the two parts, in the order of the flat batch."""
        if prefill is None:
            assert decode is not None
            return decode
        if decode is None:
            return prefill
        assert self.decode is not None and self.prefill is not None
        joined = torch.empty((self.num_tokens, *decode.shape[1:]), dtype=decode.dtype, device=decode.device)
        for part, rows in ((self.decode, decode), (self.prefill, prefill)):
            if part.tokens.rows is None:
                joined.narrow(0, part.tokens.first, part.tokens.count).copy_(rows)
            else:
                joined.index_copy_(0, part.tokens.rows, rows)
        return joined


class _Latest(threading.local):
    context: ForwardContext | None = None
    step: StateStep | None = None


_latest = _Latest()


def state_step(x: Tensor) -> StateStep:
    """The plan of the step in progress; without one, of one sequence from position 0 whose state is not kept.

    Args:
        x: [num_tokens, ...], for their number and device.
    """
    context = get_forward_context()
    if context is None:
        return _without_context(x.shape[0], x.device)
    if _latest.context is not context or _latest.step is None:
        _latest.step = _plan(context, x.device)
        _latest.context = context
    return _latest.step


def _without_context(num_tokens: int, device: torch.device) -> StateStep:
    return _step([_Request(0, num_tokens, -1, True)] if num_tokens else [], num_tokens, device)


@dataclass(frozen=True, slots=True)
class _Request:
    first_token: int
    length: int
    slot: int
    fresh: bool


def _plan(context: ForwardContext, device: torch.device) -> StateStep:
    lengths = context.query_lens_host
    slots = context.state_slots_host or (-1,) * len(lengths)
    starts = [0, *accumulate(lengths)]
    requests = [
        _Request(start, new, slot, slot < 0 or total == new)
        for start, new, total, slot in zip(starts, lengths, context.seq_lens_host, slots, strict=False)
        if new
    ]
    return _step(requests, starts[-1], device)


def _step(requests: Sequence[_Request], num_tokens: int, device: torch.device) -> StateStep:
    decode = [request for request in requests if request.length == 1]
    prefill = [request for request in requests if request.length > 1]
    native = None
    if requests and device.type == "cpu" and state_space.available():
        native = state_space.StepRequests(
            [(request.first_token, request.length, request.slot, request.fresh) for request in requests], num_tokens
        )
    return StateStep(
        num_tokens,
        _sequences(decode, device) if decode else None,
        _sequences(prefill, device) if prefill else None,
        native,
    )


def _sequences(requests: Sequence[_Request], device: torch.device) -> Sequences:
    first, count = requests[0].first_token, sum(request.length for request in requests)
    last = requests[-1]
    rows = None
    if last.first_token + last.length - first != count:
        places = [range(request.first_token, request.first_token + request.length) for request in requests]
        rows = torch.tensor([token for run in places for token in run], device=device)
    return Sequences(
        Tokens(count, first, rows), tuple(request.length for request in requests), _slots(requests, device)
    )


def _slots(requests: Sequence[_Request], device: torch.device) -> Slots:
    slots = [request.slot for request in requests]
    flags = [request.fresh for request in requests]
    fresh: Tensor | bool | None = True if all(flags) else None
    if fresh is None and any(flags):
        fresh = torch.tensor(flags, device=device)
    if slots[0] >= 0 and slots == list(range(slots[0], slots[0] + len(slots))):
        return Slots(len(slots), first=slots[0], fresh=fresh)
    rows = torch.tensor([max(slot, 0) for slot in slots], device=device)
    if min(slots) >= 0:
        return Slots(len(slots), rows=rows, fresh=fresh)
    kept = [place for place, slot in enumerate(slots) if slot >= 0]
    return Slots(
        len(slots),
        rows=rows,
        fresh=fresh,
        kept=torch.tensor(kept, dtype=torch.int64, device=device),
        kept_rows=torch.tensor([slots[place] for place in kept], dtype=torch.int64, device=device),
    )
