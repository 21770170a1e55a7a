"""The attention backend for CPU, and in plain PyTorch for any device: a kernel of our own for requests with one new
token where there is one, `scaled_dot_product_attention` over slices of the cache otherwise.

A step is planned once, on first use by a layer, and executed by every layer with the same window. The cache is [1,
num_kv_heads, slots, head_size] in the shape that SDPA takes, in memory slot by slot, so that writing a token touches
one place and any run of consecutive blocks is a view.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from torchplug.forward_context import BlockLayout, ForwardContext
from torchplug.layers.cpu import kernels
from torchplug.layers.cpu.kernels import PagedStep

name: Final = "scaled_dot_product_attention"
block_multiple: Final = 1
replayable: Final = False


def allocate_kv_cache(
    num_slots: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values of one layer, each [1, num_kv_heads, num_slots, head_size], in memory as [num_slots,
    num_kv_heads, head_size]. Not initialised: a slot is never read before it is written, and memory is taken as slots
    are used.
    """

    def half() -> Tensor:
        return torch.empty(num_slots, num_kv_heads, head_size, dtype=dtype, device=device).transpose(0, 1).unsqueeze(0)

    return half(), half()


@dataclass(frozen=True, slots=True)
class _Run:
    """Keys in consecutive slots: a view."""

    start: int
    length: int

    def of(self, cache: Tensor) -> Tensor:
        return cache.narrow(2, self.start, self.length)


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Keys of `count` requests in blocks anywhere, copied to [count, num_kv_heads, length, head_size]. `slots` is int64
    [count * length]; a shorter request repeats one of its own."""

    slots: Tensor
    count: int

    def of(self, cache: Tensor) -> Tensor:
        # Rows of [slots, num_kv_heads * head_size] are copied whole, 5 times as fast as along the third dimension.
        rows = cache[0].transpose(0, 1).flatten(1).index_select(0, self.slots)
        return rows.view(self.count, -1, cache.shape[1], cache.shape[3]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Stride:
    """Keys of `count` requests of equal length, each in consecutive slots `step` slots after those of the one before: a
    view [count, num_kv_heads, length, head_size]."""

    start: int
    step: int
    count: int
    length: int

    def of(self, cache: Tensor) -> Tensor:
        heads, size = cache.shape[1], cache.shape[3]
        slot = heads * size
        return cache.as_strided(
            (self.count, heads, self.length, size),
            (self.step * slot, size, slot, 1),
            cache.storage_offset() + self.start * slot,
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens [start, start + num_tokens) of the flat batch and the keys they see: one request's, or with `decode` one
    token each of as many requests.

    `mask` is added to the scores, [num_tokens, keys], with `decode` [num_tokens, 1, 1, keys]; None with `causal` is the
    triangle, without it everything.
    """

    start: int
    num_tokens: int
    decode: bool
    keys: _Run | _Gathered | _Stride | PagedStep
    causal: bool = False
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every layer of one window does in this step. `write` says where new keys go: consecutive slots from a first
    one, or int64 slots."""

    write: int | Tensor | None
    parts: tuple[_Part, ...]


class _Latest(threading.local):
    context: ForwardContext | None = None
    plans: dict[tuple[int | None, int, torch.dtype, bool, bool], StepPlan]


_latest = _Latest()


def plan_step(
    context: ForwardContext | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: tuple[Tensor, Tensor] | None,
    window: int | None,
    *,
    group: int,
) -> StepPlan:
    """The plan for `context`, made by the first layer that asks in a step and shared by the others.

    Args:
        context: The step's layout; None for one sequence from position 0.
        query: As in `Attention.forward`, for dtype, device and sizes; so are key and value.
        key: The new keys.
        value: The new values.
        kv_cache: The layer's. Without one, keys are those of the batch itself.
        window: The layer's sliding window.
        group: The layer's cache group.
    """
    if context is None:
        num_tokens = query.shape[0]
        return StepPlan(None, (_prompt_part(0, num_tokens, num_tokens, 0, _Run(0, num_tokens), query, window),))
    if _latest.context is not context:
        _latest.context = context
        _latest.plans = {}
    cached = kv_cache is not None
    paged = kv_cache is not None and kernels.pages(query, key, value, kv_cache[0])
    name = (window, group, query.dtype, cached, paged)
    plan = _latest.plans.get(name)
    if plan is None:
        if cached:
            layout = context.more_groups[group - 1] if group else context
            plan = _plan(context, layout, query, window, None if paged else key.shape[1] * query.element_size())
        else:
            plan = _plan_uncached(context, query, window)
        _latest.plans[name] = plan
    return plan


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: tuple[Tensor, Tensor] | None,
    plan: StepPlan,
    num_kv_heads: int,
    head_size: int,
    scale: float,
) -> Tensor:
    """Store the new keys and values, then attend. Shapes as in `Attention.forward`."""
    first = plan.parts[0] if plan.parts else None
    if first is not None and isinstance(first.keys, PagedStep) and len(plan.parts) == 1:
        assert kv_cache is not None
        return kernels.paged_attention(first.keys, query, key, value, *kv_cache, num_kv_heads, head_size, scale)
    num_tokens = query.shape[0]
    new_keys = key.reshape(1, num_tokens, num_kv_heads, head_size).transpose(1, 2)
    new_values = value.reshape(1, num_tokens, num_kv_heads, head_size).transpose(1, 2)
    if kv_cache is None or plan.write is None:
        keys, values = new_keys, new_values
    else:
        keys, values = kv_cache
        if isinstance(plan.write, int):
            keys.narrow(2, plan.write, num_tokens).copy_(new_keys)
            values.narrow(2, plan.write, num_tokens).copy_(new_values)
        else:
            keys.index_copy_(2, plan.write, new_keys)
            values.index_copy_(2, plan.write, new_values)
    if len(plan.parts) == 1:
        return _attend_part(query, keys, values, plan.parts[0], scale)
    result = torch.empty_like(query)
    for part in plan.parts:
        rows = slice(part.start, part.start + part.num_tokens)
        if isinstance(part.keys, PagedStep):
            new = query[rows], key[rows], value[rows]
            result[rows] = kernels.paged_attention(part.keys, *new, keys, values, num_kv_heads, head_size, scale)
        else:
            result[rows] = _attend_part(query[rows], keys, values, part, scale)
    return result


# Which form of SDPA, measured on CPU (torch 2.13, head size 64, 1 thread, us per call, 2026-12-01).
#
# One new token: the heads of a group are the rows of one query, so that each key is read once for all of them.
#                                   keys    16    64   256  1024        bfloat16 | float32    16    64   256  1024
#   3 heads on each of 3 keys, rows         14    19    46   148                              10    15    37   140
#                              enable_gqa   24    68   256   982                              11    17    40   169
#   7 heads on each of 2 keys, rows         13    17    37   120                              10    14    30   100
#                              enable_gqa   33    98   388  1508                              13    22    55   238
#   1 head on each of 9 keys,  rows         23    69   260  1112                              11    17    48   174
#                              2 equal rows 27    51   162   655                              22    50   168   681
# Matrix products and softmax by hand were slower than the best of these, but for the last line at 256 (148) and 1024.
#
# Several requests with one new token each, 3 heads on 3 keys of size 64: a call each over views of their keys; one call
# over a strided view, where the requests are equally long and far apart; one call over keys copied from blocks anywhere
# and padded to the longest, with a mask (whole attention of one layer, without that of planning):
#                                   keys   128   512  1024         bfloat16 | float32   128   512  1024
#   8 requests                     views   248   655  1358                              206   614  1411
#                                 stride   168   564  1195                              135   588  1553
#                                 copied   202   682  1825                              184   885  6828
#   32 requests                    views  1123  9081 18023                              879  8855 10213
#                                 stride   697  8634 17949                              537  8440 20794
#                                 copied  1068 10569 25471                              852 16009 29321
# So a stride wherever there is one, else copies while a call costs more than copying and padding (`_worth_copying`).
# Padding repeats a slot of the same request: what others left in theirs, a NaN or infinity, would pass the mask.
#
# A prompt: enable_gqa, keys expanded by a stride of 0 and repeated keys cost the same to 3 % (128 tokens, 3 heads on 3
# keys: 638, 642, 664 in bfloat16); by hand 441 there, but 8 % slower for 512 tokens after 1536, up to twice in float32.


def _attend_part(query: Tensor, keys: Tensor, values: Tensor, part: _Part, scale: float) -> Tensor:
    """query: [num_tokens, heads * head_size] -> the same shape."""
    num_tokens = query.shape[0]
    assert not isinstance(part.keys, PagedStep)
    keys, values = part.keys.of(keys), part.keys.of(values)
    num_kv_heads, head_size = keys.shape[1], keys.shape[3]
    if part.decode:
        rows = query.reshape(num_tokens, num_kv_heads, -1, head_size)
        only = rows.shape[2] == 1 and rows.is_cpu and rows.dtype is torch.bfloat16
        if only:
            rows = rows.expand(-1, -1, 2, -1)
        mask = part.mask if part.mask is None else part.mask.expand(-1, -1, rows.shape[2], -1)
        out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
        return (out[:, :, 0] if only else out).reshape(num_tokens, -1)
    heads = query.reshape(1, num_tokens, -1, head_size).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        heads, keys, values, attn_mask=part.mask, is_causal=part.causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(num_tokens, -1)


@dataclass(frozen=True, slots=True)
class _Decode:
    """A request with one new token: its place in the batch, and the positions [first, length) that the token sees."""

    request: int
    first: int
    length: int
    keys: _Run | None


def _plan(
    context: ForwardContext,
    layout: ForwardContext | BlockLayout,
    query: Tensor,
    window: int | None,
    key_bytes: int | None,
) -> StepPlan:
    """`key_bytes`: what a token's keys take, for what it costs to copy them; None where the native kernel reads them in
    place."""
    size = context.block_size
    if key_bytes is None and min(context.query_lens_host) == max(context.query_lens_host) == 1:
        step = PagedStep(layout.block_tables, context.seq_lens, layout.slot_mapping, size, window)
        return StepPlan(None, (_Part(0, step.requests, True, step),))
    parts: list[_Part] = []
    decodes: list[_Decode] = []  # those right before `start`
    start = 0
    for request, (new, length) in enumerate(zip(context.query_lens_host, context.seq_lens_host, strict=True)):
        if new == 0:
            continue
        first = 0 if window is None else max(0, length - new - window + 1)
        blocks = layout.block_tables_host[request][first // size : (length - 1) // size + 1]
        run = _Run(blocks[0] * size + first % size, length - first) if _consecutive(blocks) else None
        if new == 1:
            decodes.append(_Decode(request, first, length, run))
        else:
            parts += _decode_parts(context, layout, query, start, decodes, window, key_bytes)
            decodes = []
            keys = run or _gathered(context, layout, [_Decode(request, first, length, None)])
            parts.append(_prompt_part(start, new, length, first, keys, query, window))
        start += new
    parts += _decode_parts(context, layout, query, start, decodes, window, key_bytes)
    return StepPlan(_write(context, layout), tuple(parts))


def _decode_parts(
    context: ForwardContext,
    layout: ForwardContext | BlockLayout,
    query: Tensor,
    stop: int,
    decodes: list[_Decode],
    window: int | None,
    key_bytes: int | None,
) -> list[_Part]:
    """Parts for requests with one new token each, whose tokens are the last ones before `stop`."""
    start, count = stop - len(decodes), len(decodes)
    if key_bytes is None:
        if not count:
            return []
        seen = torch.tensor([decode.length for decode in decodes], dtype=torch.int32)
        slots = layout.slot_mapping[start:stop]
        step = PagedStep(_tables(layout, decodes), seen, slots, context.block_size, window)
        return [_Part(start, count, True, step)]
    if count > 1:
        if stride := _stride(decodes):
            return [_Part(start, count, True, stride)]
        lengths = [decode.length - decode.first for decode in decodes]
        if _worth_copying(lengths, key_bytes):
            mask = None
            if min(lengths) < max(lengths):
                device = query.device
                places = torch.arange(max(lengths), device=device)
                beyond = places >= torch.tensor(lengths, device=device)[:, None]
                mask = torch.zeros(beyond.shape, dtype=query.dtype, device=device)
                mask = mask.masked_fill_(beyond, float("-inf"))[:, None, None]
            return [_Part(start, count, True, _gathered(context, layout, decodes), mask=mask)]
    return [
        _Part(start + index, 1, True, decode.keys or _gathered(context, layout, [decode]))
        for index, decode in enumerate(decodes)
    ]


def _stride(decodes: list[_Decode]) -> _Stride | None:
    """One view of all these requests' keys, if there is one."""
    one, two = decodes[0].keys, decodes[1].keys
    if one is None or two is None:
        return None
    step = two.start - one.start
    if step <= 0:
        return None
    for index, decode in enumerate(decodes):
        keys = decode.keys
        if keys is None or keys.length != one.length or keys.start != one.start + index * step:
            return None
    return _Stride(one.start, step, len(decodes), one.length)


def _worth_copying(lengths: list[int], key_bytes: int) -> bool:
    """Whether one call over copied and padded keys costs less than a call for each request, on CPU.

    From the table above, in ns: 0.1 to copy a byte of keys and its values, 0.36 to attend to it, 8000 for a call.
    """
    padded = len(lengths) * max(lengths)
    return key_bytes * (0.1 * padded + 0.36 * (padded - sum(lengths))) < 8000 * len(lengths)


def _plan_uncached(context: ForwardContext, query: Tensor, window: int | None) -> StepPlan:
    if context.query_lens_host != context.seq_lens_host:
        raise RuntimeError(
            "an Attention layer without a kv_cache was given a step that continues requests "
            f"(new tokens {context.query_lens_host}, lengths {context.seq_lens_host}); bind one first"
        )
    parts, start = [], 0
    for new in context.query_lens_host:
        if new:
            parts.append(_prompt_part(start, new, new, 0, _Run(start, new), query, window))
        start += new
    return StepPlan(None, tuple(parts))


def _prompt_part(
    start: int, new: int, length: int, first: int, keys: _Run | _Gathered, query: Tensor, window: int | None
) -> _Part:
    """`new` tokens at the end of a request of `length` tokens, whose keys from position `first` on are `keys`."""
    if new == length and (window is None or length <= window):
        return _Part(start, new, False, keys, causal=True)
    queries = torch.arange(length - new, length, device=query.device)[:, None]
    positions = torch.arange(first, length, device=query.device)
    seen = positions <= queries
    if window is not None:
        seen &= positions > queries - window
    mask = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))
    return _Part(start, new, False, keys, mask=mask)


def _gathered(context: ForwardContext, layout: ForwardContext | BlockLayout, decodes: list[_Decode]) -> _Gathered:
    """The slots of these requests' keys, padded to the longest with each one's own first slot."""
    size, device = context.block_size, layout.block_tables.device
    tables = _tables(layout, decodes)
    firsts = torch.tensor([[decode.first] for decode in decodes], device=device)
    lengths = torch.tensor([[decode.length] for decode in decodes], device=device)
    places = firsts + torch.arange(max(decode.length - decode.first for decode in decodes), device=device)
    places = torch.where(places < lengths, places, firsts)
    blocks = tables.gather(1, places.div(size, rounding_mode="floor"))
    return _Gathered((blocks * size + places % size).flatten(), len(decodes))


def _tables(layout: ForwardContext | BlockLayout, decodes: list[_Decode]) -> Tensor:
    """The block tables of these requests, a row each."""
    tables = layout.block_tables
    first, last = decodes[0].request, decodes[-1].request
    if last - first + 1 == len(decodes):
        return tables[first : last + 1]
    # Requests without a new token lie between.
    return tables[torch.tensor([decode.request for decode in decodes], device=tables.device)]


def _write(context: ForwardContext, layout: ForwardContext | BlockLayout) -> int | Tensor:
    """Where new keys go: the first slot where one request writes to consecutive slots, else the slot of each token."""
    if len(context.query_lens_host) == 1:
        size, (new,), (length,), (blocks,) = (
            context.block_size,
            context.query_lens_host,
            context.seq_lens_host,
            layout.block_tables_host,
        )
        begin = length - new
        if new and _consecutive(blocks[begin // size : (length - 1) // size + 1]):
            return blocks[begin // size] * size + begin % size
    return layout.slot_mapping


def _consecutive(blocks: tuple[int, ...]) -> bool:
    count = len(blocks)
    return count == 1 or (blocks[-1] - blocks[0] == count - 1 and blocks == tuple(range(blocks[0], blocks[0] + count)))
