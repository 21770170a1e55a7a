"""The blocks of each request: found in the prefix cache, added as it grows, given up as its windows slide.

Each cache group has a pool and, per request, a table of block ids in the order of its tokens. What one pool cannot give
is given by none: a request is admitted or extended in all groups or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchplug.engine.block_pool import BlockKey, BlockPool

if TYPE_CHECKING:
    from torchplug.engine.request import Request

_SPARE_TOKENS: Final = 256
"""Blocks for so many coming tokens are kept beside a request while nobody else needs them, so that its blocks stay
neighbours and the backend reads them as a view."""


@dataclass(slots=True)
class PrefixCacheStats:
    """Prompt tokens looked up in the prefix cache and found there, each request once."""

    queries: int = 0
    hits: int = 0

    @property
    def hit_rate(self) -> float:
        """Between 0 and 1."""
        return self.hits / self.queries if self.queries else 0.0


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
        hash_function: Of block keys; tests pass a bad one.

    Attributes:
        pools: One for each group.
        stats: Hits of the prefix cache.
    """

    def __init__(
        self,
        groups: Sequence[tuple[int | None, int]],
        block_size: int,
        *,
        prefix_caching: bool = True,
        whole_above: int | None = None,
        hash_function: Callable[[object], int] = hash,
    ) -> None:
        self.pools = tuple(BlockPool(num_blocks) for _, num_blocks in groups)
        self.stats = PrefixCacheStats()
        self._windows = tuple(window for window, _ in groups)
        self._block_size = block_size
        self._prefix_caching = prefix_caching and bool(groups)
        self._whole_above = whole_above
        self._hash = hash_function

    @property
    def num_held(self) -> int:
        """Blocks that requests hold, over all groups; 0 when idle."""
        return sum(pool.num_held for pool in self.pools)

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold, of the fullest group, between 0 and 1."""
        return max((pool.num_held / pool.num_blocks for pool in self.pools), default=0.0)

    def admit(self, request: Request, budget: int) -> bool:
        """Give a request that has no blocks those of its cached prefix and of its other tokens; sets `num_computed` to
        the tokens found in the cache. False, and nothing changed: there is no room now.

        Groups without a window give blocks for all tokens at once, so that a long prompt is not admitted piece by piece
        and preempted on the way; groups with one for the first chunk of `budget` tokens.
        """
        cached, found = self._cached_prefix(request)
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
        for pool, table, needed in zip(self.pools, tables, wanted, strict=True):
            table.grow(pool, needed, self._spare(request, pool, needed))
        if request.num_cached_tokens is None:
            request.num_cached_tokens = start
            if self._prefix_caching:
                self.stats.queries += num_tokens
                self.stats.hits += start
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
        return True

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
        """Release a request's blocks. Harmless for one without."""
        tables, request.blocks = request.blocks, []
        for pool, table in zip(self.pools, tables, strict=bool(tables)):
            table.release(pool)

    def reset(self) -> None:
        """Make every block empty; nothing is cached. No request may have blocks."""
        for pool in self.pools:
            pool.reset()

    def _cached_prefix(self, request: Request) -> tuple[int, list[list[int]]]:
        """How many of a request's first blocks need not be computed, and for each group their ids. At least its last
        token is always computed, since its logits are wanted."""
        nothing: list[list[int]] = [[] for _ in self.pools]
        if not request.reads_prefix_cache:
            return 0, nothing
        most = min((len(request.token_ids) - 1) // self._block_size, self._most_cached(request))
        found: list[list[int | None]] = [[] for _ in self.pools]
        # runs[g]: found blocks of group g in a row, up to the current one.
        runs = [0] * len(self.pools)
        best = 0
        for index in range(most):
            key = self._key(request, index)
            for group, pool in enumerate(self.pools):
                block = pool.find(key)
                found[group].append(block)
                if block is None:
                    if self._windows[group] is None:
                        return best, self._ids(found, best)
                    runs[group] = 0
                else:
                    runs[group] += 1
                    # The pool's own key object: what is built on it compares by identity.
                    request.block_keys[index] = pool.key(block) or key
            count = index + 1
            if all(
                window is None or run >= count - self._first(window, count * self._block_size)
                for window, run in zip(self._windows, runs, strict=True)
            ):
                best = count
        return best, self._ids(found, best)

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
