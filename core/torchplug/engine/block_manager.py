"""The blocks of each request: found in the prefix cache, added as it grows, given up as its windows slide.

Each cache group has a pool and, per request, a table of block ids in the order of its tokens. What one pool cannot give
is given by none: a request is admitted or extended in all groups or not at all. A prefix is found where all groups, and
the snapshots of recurrent states, have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from torchplug.engine.block_pool import BlockKey, BlockPool
from torchplug.engine.state_snapshots import StateSnapshots

if TYPE_CHECKING:
    from torchplug.engine.request import Request

_SPARE_TOKENS: Final = 256
"""Blocks for so many coming tokens are kept beside a request while nobody else needs them, so that its blocks stay
neighbours and the backend reads them as a view."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Prompt tokens looked up in the prefix cache and found there, each request once.

    `limited`: by cache group, how many requests found less because of it than another group offered.
    """

    queries: int = 0
    hits: int = 0
    limited: dict[str, int] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Between 0 and 1."""
        return self.hits / self.queries if self.queries else 0.0


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What of a request is cached: its first `count` blocks, their ids in each group, the snapshot of the state after
    them, and the group without which it would be more."""

    count: int
    ids: list[list[int]]
    snapshot: int | None = None
    limited_by: str | None = None
    waits: bool = False  # a running request is about to keep the state of a longer prefix


class BlockTable:
    """One request's blocks in one group.

    Attributes:
        ids: Block ids in the order of the request's tokens; those that slid out of the window are 0.
        first: Entries before this one slid out.
        needed: Entries that have or get content; the rest are spare.
        copied: Entries that the runner has copied so far.
    """

    __slots__ = ("_frozen", "copied", "first", "ids", "needed")

    def __init__(self, ids: list[int], first: int) -> None:
        self.ids = ids
        self.first = first
        self.needed = len(ids)
        self.copied = 0
        self._frozen: tuple[int, ...] | None = None

    @property
    def frozen(self) -> tuple[int, ...]:
        """`ids`, made once after each change."""
        if self._frozen is None:
            self._frozen = tuple(self.ids)
        return self._frozen

    def grow(self, pool: BlockPool, needed: int, spare: int) -> None:
        """Have `needed` entries."""
        missing = needed - len(self.ids)
        if missing > 0:
            after = self.ids[-1] if len(self.ids) > self.first else None
            self.ids += pool.allocate(missing, after=after, spare=spare)
            self._frozen = None
        self.needed = max(self.needed, needed)

    def slide(self, pool: BlockPool, first: int) -> None:
        """Release the entries before `first`."""
        if first > self.first:
            # Not from the last to the first: here the oldest block is the least useful one.
            pool.release(self.ids[self.first : first])
            self.ids[self.first : first] = [0] * (first - self.first)
            self.first = first
            self._frozen = None

    def trim(self, pool: BlockPool) -> bool:
        """Release what is spare; whether anything was."""
        spare = self.ids[self.needed :]
        if not spare:
            return False
        del self.ids[self.needed :]
        self.copied = min(self.copied, self.needed)
        self._frozen = None
        pool.release(reversed(spare))
        return True

    def release(self, pool: BlockPool) -> None:
        """Release everything, so that a beginning outlives what follows it."""
        pool.release(reversed(self.ids[self.first :]))


class BlockManager:
    """Pools and tables.

    Args:
        groups: (sliding window or None, number of blocks) of each cache group; none for a model without a cache.
        block_size: Tokens of a block.
        prefix_caching: Whether full blocks are kept for later requests that begin alike.
        whole_above: A prompt of more tokens than this takes no part in prefix caching, and no block past this many
            tokens does, since its keys depend on how long the request was (`depends_on_length` of a layer).
        state_snapshots: Slots for snapshots of recurrent states; None for a model without recurrent layers, or where
            nothing is kept of them. (Then nothing of a prompt can be left uncomputed: caching has to be off.)
        hash_function: Of block keys; tests pass a bad one.

    Attributes:
        pools: One for each group.
        snapshots: Of recurrent states; None where there are none.
        stats: Hits of the prefix cache.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int | None, int]],
        block_size: int,
        *,
        prefix_caching: bool = True,
        whole_above: int | None = None,
        state_snapshots: int | None = None,
        hash_function: Callable[[object], int] = hash,
    ) -> None:
        self.pools = tuple(BlockPool(num_blocks) for _, num_blocks in groups)
        self.snapshots: StateSnapshots | None = None
        if state_snapshots is not None and prefix_caching:
            self.snapshots = StateSnapshots(state_snapshots, block_size, self._key)
            for pool, (window, _) in zip(self.pools, groups, strict=True):
                if window is None:
                    pool.on_eviction = self.snapshots.forget
        self.stats = PrefixCacheStats()
        self._windows = tuple(window for window, _ in groups)
        self._block_size = block_size
        self._prefix_caching = prefix_caching and (bool(groups) or state_snapshots is not None)
        self._names = tuple("attention" if w is None else f"attention (window {w})" for w in self._windows)
        self._whole_above = whole_above
        self._hash = hash_function

    @property
    def num_held(self) -> int:
        """Blocks and snapshots that requests hold, over all groups; 0 when idle."""
        snapshots = 0 if self.snapshots is None else self.snapshots.pool.num_held
        return sum(pool.num_held for pool in self.pools) + snapshots

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, of the fullest group, between 0 and 1."""
        return max((pool.num_held / pool.num_blocks for pool in self.pools), default=0.0)

    def announce(self, request: Request) -> None:
        """A new request waits: what its prompt has in common with others tells where states are worth keeping."""
        if self.snapshots is not None:
            self.snapshots.announce(
                request, min(request.num_prompt_tokens // self._block_size, self._most_cached(request))
            )

    def admit(self, request: Request, budget: int) -> bool:
        """Give a request that has no blocks those of its cached prefix and of its other tokens; sets `num_computed` to
        the tokens found in the cache. False, and nothing changed: there is no room now, or a running request is about
        to keep the state of a prefix that both have.

        Groups without a window give blocks for all tokens at once, so that a long prompt is not admitted piece by piece
        and preempted on the way; groups with one for the first chunk of `budget` tokens.
        """
        prefix = self._cached_prefix(request)
        if prefix.waits:
            return False
        cached, found = prefix.count, prefix.ids
        num_tokens = len(request.token_ids)
        start = cached * self._block_size
        stop = min(num_tokens, start + budget)
        tables, wanted = [], []
        for pool, window, ids in zip(self.pools, self._windows, found, strict=True):
            table = BlockTable(ids, self._first(window, start))
            needed = self._num_blocks(num_tokens if window is None else stop)
            taken = sum(not pool.is_held(block) for block in ids[table.first :])
            if needed - cached + taken > pool.num_available:
                return False
            tables.append(table)
            wanted.append(needed)
        for pool, table in zip(self.pools, tables, strict=True):
            pool.hold(table.ids[table.first :])
        request.blocks = tables
        request.num_computed = start
        request.num_registered = cached
        if self.snapshots is not None:
            self.snapshots.admit(request, start, prefix.snapshot, self._most_cached(request) * self._block_size)
        for pool, table, needed in zip(self.pools, tables, wanted, strict=True):
            table.grow(pool, needed, self._spare(request, pool, needed))
        if request.num_cached_tokens is None:
            request.num_cached_tokens = start
            if self._prefix_caching:
                self.stats.queries += num_tokens
                self.stats.hits += start
                if prefix.limited_by is not None:
                    request.cache_limited_by = prefix.limited_by
                    self.stats.limited[prefix.limited_by] = self.stats.limited.get(prefix.limited_by, 0) + 1
        return True

    def extend(self, request: Request, stop: int) -> bool:
        """Have blocks for tokens up to `stop` in every group, after releasing those that no layer reads any more.
        False: there is no room now."""
        for pool, window, table in zip(self.pools, self._windows, request.blocks, strict=True):
            if window is not None:
                table.slide(pool, self._first(window, request.num_computed))
        needed = self._num_blocks(stop)
        for pool, table in zip(self.pools, request.blocks, strict=True):
            if needed - len(table.ids) > pool.num_available:
                return False
        for pool, table in zip(self.pools, request.blocks, strict=True):
            if needed > table.needed:
                table.grow(pool, needed, self._spare(request, pool, needed))
        if self.snapshots is not None:
            self.snapshots.advance(request, self._most_cached(request) * self._block_size)
        return True

    def next_cut(self, request: Request) -> int | None:
        """The token at which a request's next step must end at the latest, so that its state there can be kept."""
        return None if self.snapshots is None else self.snapshots.next_cut(request)

    def register(self, request: Request, stop: int) -> None:
        """Make the blocks findable that are full once tokens up to `stop` are computed.

        It is called when that is scheduled: a later request of the same step may use them at once, because a layer
        stores all keys of a step before any of its tokens attends.
        """
        full = min(stop // self._block_size, self._most_cached(request))
        for index in range(request.num_registered, full):
            key = self._key(request, index)
            for pool, table in zip(self.pools, request.blocks, strict=True):
                if index >= table.first:
                    pool.register(table.ids[index], key)
        request.num_registered = max(request.num_registered, full)

    def trim(self, requests: Iterable[Request]) -> bool:
        """Release spare blocks; whether there were any."""
        trimmed = False
        for request in requests:
            for pool, table in zip(self.pools, request.blocks, strict=True):
                trimmed |= table.trim(pool)
        return trimmed

    def free(self, request: Request) -> None:
        """Release a request's blocks and snapshots. Harmless for one without."""
        if self.snapshots is not None:
            self.snapshots.free(request)
        tables, request.blocks = request.blocks, []
        for pool, table in zip(self.pools, tables, strict=bool(tables)):
            table.release(pool)

    def reset(self) -> None:
        """Make every block empty; nothing is cached. No request may have blocks."""
        for pool in self.pools:
            pool.reset()
        if self.snapshots is not None:
            self.snapshots.reset()

    def _cached_prefix(self, request: Request) -> _Prefix:
        """How much of a request need not be computed. Its last token always is, since its logits are wanted."""
        if not request.reads_prefix_cache:
            return _Prefix(0, [[] for _ in self.pools])
        most = min((len(request.token_ids) - 1) // self._block_size, self._most_cached(request))
        found: list[list[int | None]] = [[] for _ in self.pools]
        # runs[g]: found blocks of group g in a row, up to the current one; own[g]: blocks that group g alone offers.
        runs = [0] * len(self.pools)
        own = [0] * len(self.pools)
        best, snapshot, coming, attention, kept = 0, None, 0, 0, 0
        for index in range(most):
            key = self._key(request, index)
            count = index + 1
            ended = False
            everywhere = True
            for group, pool in enumerate(self.pools):
                block = pool.find(key)
                found[group].append(block)
                window = self._windows[group]
                if block is None:
                    ended |= window is None
                    runs[group] = 0
                else:
                    runs[group] += 1
                    # The pool's own key object: what is built on it compares by identity.
                    request.block_keys[index] = pool.key(block) or key
                if runs[group] >= (count if window is None else count - self._first(window, count * self._block_size)):
                    own[group] = count
                else:
                    everywhere = False
            if everywhere:
                attention = count
            if self.snapshots is None:
                best = attention
                if ended:
                    break
                continue
            slot = self.snapshots.find(key)
            if slot is not None:
                kept = count
                if everywhere:
                    best, snapshot = count, slot
            elif self.snapshots.is_coming(key):
                coming = count
        limited_by = self._limiting(request, best, own, attention, kept, most)
        return _Prefix(best, self._ids(found, best), snapshot, limited_by, waits=coming > best)

    def _limiting(
        self, request: Request, best: int, own: list[int], attention: int, kept: int, most: int
    ) -> str | None:
        """The group that made a prefix of `best` blocks out of a longer one.

        `own`: what each group of attention layers offers, `attention`: what all of them do, `kept`: the longest prefix
        whose state is there.
        """
        if self.snapshots is None:
            offered = max(own, default=0)
        else:
            # Without attention layers, what other prompts had in common says what might have been found.
            offered = max(*own, kept) if own else self.snapshots.num_seen(request, most)
        if best >= offered:
            return None
        # The one without which it would be longest.
        if self.snapshots is not None and attention >= kept:
            return "state"
        return self._names[min(range(len(own)), key=own.__getitem__)]

    def _ids(self, found: list[list[int | None]], count: int) -> list[list[int]]:
        start = count * self._block_size
        result = []
        for window, blocks in zip(self._windows, found, strict=True):
            first = self._first(window, start)
            result.append([0] * first + [block for block in blocks[first:count] if block is not None])
        return result

    def _most_cached(self, request: Request) -> int:
        """How many of a request's first blocks may take part in prefix caching."""
        if not self._prefix_caching:
            return 0
        if self._whole_above is None:
            return len(request.token_ids) // self._block_size
        return 0 if request.num_prompt_tokens > self._whole_above else self._whole_above // self._block_size

    def _key(self, request: Request, index: int) -> BlockKey:
        keys, size = request.block_keys, self._block_size
        while len(keys) <= index:
            start = len(keys) * size
            parent = keys[-1] if keys else None
            tokens = tuple(request.token_ids[start : start + size])
            keys.append(BlockKey(parent, tokens, request.cache_extra, self._hash))
        return keys[index]

    def _spare(self, request: Request, pool: BlockPool, needed: int) -> int:
        if pool.num_available * 4 < pool.num_blocks:
            return 0
        left = min(request.max_tokens - request.num_output_tokens, _SPARE_TOKENS)
        coming = self._num_blocks(len(request.token_ids) + left) - needed
        return max(0, min(coming, _SPARE_TOKENS // self._block_size))

    def _first(self, window: int | None, start: int) -> int:
        """The first block that a token at `start` or later reads."""
        return 0 if window is None else max(0, start - window + 1) // self._block_size

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
