"""The attention backend in plain PyTorch: `scaled_dot_product_attention` over slices of the cache.

A step is planned once, on first use by a layer, and executed by every layer with the same window. The cache is [1,
num_kv_heads, slots, head_size] in the shape that SDPA takes, in memory slot by slot, so that writing a token touches
one place and any run of consecutive blocks is a view.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from torchplug.forward_context import ForwardContext


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


def copy_kv_cache(
    source: tuple[Tensor, Tensor],
    target: tuple[Tensor, Tensor],
    num_blocks: int,
    block_size: int,
    target_block_size: int,
) -> None:
    """Copy `num_blocks` blocks into a cache whose blocks may be longer."""
    for old, new in zip(source, target, strict=True):
        heads, size = new.shape[1], new.shape[3]
        blocks = new.view(1, heads, -1, target_block_size, size)[:, :, :num_blocks, :block_size]
        blocks.copy_(old.view(1, heads, -1, block_size, size)[:, :, :num_blocks])


@dataclass(frozen=True, slots=True)
class _Run:
    """Keys in consecutive slots: a view."""

    start: int
    length: int

    def of(self, cache: Tensor) -> Tensor:
        return cache.narrow(2, self.start, self.length)


@dataclass(frozen=True, slots=True)
class _Scattered:
    """Keys of one request in blocks anywhere: gathered. `slots` is int64 [length]."""

    slots: Tensor

    def of(self, cache: Tensor) -> Tensor:
        return cache.index_select(2, self.slots)


@dataclass(frozen=True, slots=True)
class _SideBySide:
    """Keys of `count` requests of equal length in neighbouring blocks: a view [count, num_kv_heads, length,
    head_size]."""

    first_block: int
    count: int
    block_size: int
    offset: int
    length: int

    def of(self, cache: Tensor) -> Tensor:
        blocks = cache[0].narrow(1, self.first_block * self.block_size, self.count * self.block_size)
        by_block = blocks.view(blocks.shape[0], self.count, self.block_size, blocks.shape[2])
        return by_block.transpose(0, 1).narrow(2, self.offset, self.length)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens [start, start + num_tokens) of the flat batch and the keys they see: one request's, or one token each of
    `_SideBySide` requests.

    `mask` is added to the scores, [num_tokens, keys]; None with `causal` is the triangle, without it everything.
    """

    start: int
    num_tokens: int
    decode: bool
    keys: _Run | _Scattered | _SideBySide
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
    plans: dict[tuple[int | None, torch.dtype, bool], StepPlan]


_latest = _Latest()


def plan_step(context: ForwardContext | None, query: Tensor, window: int | None, *, cached: bool) -> StepPlan:
    """The plan for `context`, made by the first layer that asks in a step and shared by the others.

    Args:
        context: The step's layout; None for one sequence from position 0.
        query: [num_tokens, ...], for its dtype and device.
        window: The layer's sliding window.
        cached: Whether the layer has a cache. Without one, keys are those of the batch itself.
    """
    if context is None:
        num_tokens = query.shape[0]
        return StepPlan(None, (_prompt_part(0, num_tokens, num_tokens, 0, _Run(0, num_tokens), query, window),))
    if _latest.context is not context:
        _latest.context = context
        _latest.plans = {}
    key = (window, query.dtype, cached)
    plan = _latest.plans.get(key)
    if plan is None:
        plan = _latest.plans[key] = _plan(context, query, window) if cached else _plan_uncached(context, query, window)
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
        rows = query.narrow(0, part.start, part.num_tokens)
        result.narrow(0, part.start, part.num_tokens).copy_(_attend_part(rows, keys, values, part, scale))
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
# 8 requests of equal length in neighbouring slots, 3 heads on 3 keys: one call 61, 111, 329, 1316 for 16 to 1024 keys
# in bfloat16, a call each 137, 181, 429, 1471. A padded, masked call costs the same as one of equal lengths, but would
# read slots that hold what an earlier request left there, and a NaN or infinity would pass the mask.
#
# A prompt: enable_gqa, keys expanded by a stride of 0 and repeated keys cost the same to 3 % (128 tokens, 3 heads on 3
# keys: 638, 642, 664 in bfloat16); by hand 441 there, but 8 % slower for 512 tokens after 1536, up to twice in float32.


def _attend_part(query: Tensor, keys: Tensor, values: Tensor, part: _Part, scale: float) -> Tensor:
    """query: [num_tokens, heads * head_size] -> the same shape."""
    num_tokens = query.shape[0]
    keys, values = part.keys.of(keys), part.keys.of(values)
    num_kv_heads, head_size = keys.shape[1], keys.shape[3]
    if part.decode:
        rows = query.reshape(num_tokens, num_kv_heads, -1, head_size)
        if rows.shape[2] == 1 and rows.is_cpu and rows.dtype is torch.bfloat16:
            rows = rows.expand(-1, -1, 2, -1)
            return F.scaled_dot_product_attention(rows, keys, values, scale=scale)[:, :, 0].reshape(num_tokens, -1)
        return F.scaled_dot_product_attention(rows, keys, values, scale=scale).reshape(num_tokens, -1)
    heads = query.reshape(1, num_tokens, -1, head_size).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        heads, keys, values, attn_mask=part.mask, is_causal=part.causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(num_tokens, -1)


def _plan(context: ForwardContext, query: Tensor, window: int | None) -> StepPlan:
    block_size = context.block_size
    parts: list[_Part] = []
    start = 0
    for request, (new, length) in enumerate(zip(context.query_lens_host, context.seq_lens_host, strict=True)):
        if new == 0:
            continue
        first = 0 if window is None else max(0, length - new - window + 1)
        blocks = context.block_tables_host[request][first // block_size : (length - 1) // block_size + 1]
        keys = _keys(context, request, blocks, first, length)
        if new > 1:
            parts.append(_prompt_part(start, new, length, first, keys, query, window))
        elif parts and (joined := _joined(parts[-1], keys, block_size)):
            parts[-1] = joined
        else:
            parts.append(_Part(start, 1, True, keys))
        start += new
    return StepPlan(_write(context), tuple(parts))


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
    start: int, new: int, length: int, first: int, keys: _Run | _Scattered, query: Tensor, window: int | None
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


def _keys(context: ForwardContext, request: int, blocks: tuple[int, ...], first: int, length: int) -> _Run | _Scattered:
    """Where positions [first, length) are; `blocks` are the ids of the blocks that hold them."""
    size = context.block_size
    if _consecutive(blocks):
        return _Run(blocks[0] * size + first % size, length - first)
    ids = context.block_tables[request].narrow(0, first // size, len(blocks)).long()
    slots = (ids[:, None] * size + torch.arange(size, device=ids.device)).flatten()
    return _Scattered(slots.narrow(0, first % size, length - first))


def _joined(part: _Part, keys: _Run | _Scattered, block_size: int) -> _Part | None:
    """`part` with the next decoding request added, where their keys are equally long and lie at the same place in
    neighbouring blocks."""
    before = part.keys
    if not (part.decode and isinstance(keys, _Run)):
        return None
    if isinstance(before, _Run):
        before = _SideBySide(before.start // block_size, 1, block_size, before.start % block_size, before.length)
    if (
        not isinstance(before, _SideBySide)
        or keys.length != before.length
        or keys.start != (before.first_block + before.count) * block_size + before.offset
    ):
        return None
    grown = _SideBySide(before.first_block, before.count + 1, block_size, before.offset, before.length)
    return _Part(part.start, part.num_tokens + 1, True, grown)


def _write(context: ForwardContext) -> int | Tensor:
    """Where new keys go: the first slot where one request writes to consecutive slots, else the slot of each token."""
    if len(context.query_lens_host) == 1:
        size, (new,), (length,), (blocks,) = (
            context.block_size,
            context.query_lens_host,
            context.seq_lens_host,
            context.block_tables_host,
        )
        begin = length - new
        if new and _consecutive(blocks[begin // size : (length - 1) // size + 1]):
            return blocks[begin // size] * size + begin % size
    return context.slot_mapping


def _consecutive(blocks: tuple[int, ...]) -> bool:
    return len(blocks) == 1 or all(after == before + 1 for before, after in pairwise(blocks))
