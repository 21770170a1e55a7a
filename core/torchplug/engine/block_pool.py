"""The blocks of one cache: who holds each, which are empty, and which still keep content that a later request may use.

A block is held by any number of requests, or by none. A full block may be registered under a key that stands for its
whole content; when nobody holds it any more it stays findable until its place is needed, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import islice
from typing import Final

_EMPTY: Final = b"\1"


class BlockKey:
    """The content of one full block: its token ids, those of all blocks before it, and `extra`, whatever else changes
    the keys and values (the adapter, the images of a multimodal prompt). Equal keys have equal content: the hash only
    finds candidates, equality compares the real thing.

    Args:
        parent: The block before it; None for a prompt's first block.
        tokens: The block's token ids.
        extra: The same for all blocks of a chain, or that part of it which concerns this block.
        hash_function: Of (hash of the parent, tokens, extra); tests pass a bad one.
    """

    __slots__ = ("_hash", "extra", "parent", "tokens")

    def __init__(
        self,
        parent: BlockKey | None,
        tokens: tuple[int, ...],
        extra: Hashable = (),
        hash_function: Callable[[object], int] = hash,
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.extra = extra
        self._hash: int = hash_function((None if parent is None else parent._hash, tokens, extra))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockKey):
            return NotImplemented
        one: BlockKey | None = self
        two: BlockKey | None = other
        # A loop, since a chain may be longer than the recursion limit. Chains that share a parent object end at once.
        while one is not two:
            if one is None or two is None or one._hash != two._hash:
                return False
            if one.tokens != two.tokens or one.extra != two.extra:
                return False
            one, two = one.parent, two.parent
        return True


class BlockPool:
    """`num_blocks` blocks, ids 0 to num_blocks - 1, all empty at first. Every operation leaves each block in exactly
    one state: held, cached (findable, held by nobody) or empty.

    Attributes:
        num_blocks: All of them.
        on_eviction: Called with the key of cached content that gives way to new.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_eviction: Callable[[BlockKey], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Make every block empty, whoever holds it."""
        self._holders = [0] * self.num_blocks
        self._keys: list[BlockKey | None] = [None] * self.num_blocks
        self._findable: dict[BlockKey, int] = {}
        self._unheld: OrderedDict[int, None] = OrderedDict()  # the cached ones, least recently used first
        # One byte for each block, so that finding a run of empty ones is a search in a byte string.
        self._empty = bytearray(_EMPTY * self.num_blocks)
        self._num_empty = self.num_blocks

    @property
    def num_held(self) -> int:
        """Blocks that requests hold; 0 when idle."""
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give: empty and cached ones."""
        return self._num_empty + len(self._unheld)

    @property
    def num_findable(self) -> int:
        """Blocks whose content can be found, held or not."""
        return len(self._findable)

    def find(self, key: BlockKey) -> int | None:
        """The block with that content; it stays where it is until `hold`."""
        return self._findable.get(key)

    def key(self, block: int) -> BlockKey | None:
        """What the block is registered under."""
        return self._keys[block]

    def is_held(self, block: int) -> bool:
        """Whether any request holds it."""
        return self._holders[block] > 0

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these blocks, which `find` gave."""
        for block in blocks:
            if not self._holders[block]:
                del self._unheld[block]
            self._holders[block] += 1

    def allocate(self, count: int, *, after: int | None = None, spare: int = 0) -> list[int]:
        """`count` blocks for a new holder, and up to `spare` more where empty ones follow them.

        Neighbouring ids are preferred, since a backend reads a run of blocks as a view: those behind block `after`,
        else the first run of empty blocks that is long enough. Cached content is evicted only for `count`, and only
        when no block is empty. The caller has looked at `num_available`.
        """
        blocks: list[int] = []
        if after is not None:
            self._claim(self._empty_from(after + 1, count + spare), blocks)
        missing = count - len(blocks)
        if missing > 0:
            for length in (missing + spare, missing):
                start = self._empty.find(_EMPTY * length)
                if start >= 0:
                    self._claim(range(start, start + length), blocks)
                    break
            else:
                self._claim(self._scattered(missing), blocks)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less for each. What is registered stays findable; of these blocks the first released is evicted
        first, so give a request's last block first."""
        for block in blocks:
            left = self._holders[block] - 1
            if left < 0:
                raise RuntimeError(f"block {block} was released more often than it was held")
            self._holders[block] = left
            if not left:
                if self._keys[block] is None:
                    self._empty[block] = 1
                    self._num_empty += 1
                else:
                    self._unheld[block] = None

    def register(self, block: int, key: BlockKey) -> None:
        """Make a held block's content findable; where equal content already is, that block stays the one."""
        if self._keys[block] is None and key not in self._findable:
            self._keys[block] = key
            self._findable[key] = block

    def unregister(self, block: int) -> None:
        """What a block holds cannot be found any more; one that nobody holds is empty then."""
        key = self._keys[block]
        if key is None:
            return
        del self._findable[key]
        self._keys[block] = None
        if not self._holders[block]:
            del self._unheld[block]
            self._empty[block] = 1
            self._num_empty += 1

    def forget(self) -> None:
        """Nothing is findable any more; who holds what does not change."""
        self._findable.clear()
        self._keys = [None] * self.num_blocks
        for block in self._unheld:
            self._empty[block] = 1
        self._num_empty += len(self._unheld)
        self._unheld.clear()

    def _empty_from(self, start: int, most: int) -> list[int]:
        stop, end = start, min(start + most, self.num_blocks)
        while stop < end and self._empty[stop]:
            stop += 1
        return list(range(start, stop))

    def _scattered(self, count: int) -> list[int]:
        """Empty blocks anywhere, then the least recently used."""
        found: list[int] = []
        block = self._empty.find(_EMPTY)
        while block >= 0 and len(found) < count:
            found.append(block)
            block = self._empty.find(_EMPTY, block + 1)
        found += islice(self._unheld, count - len(found))
        # In order, they are a run again where one request's blocks are evicted together.
        return sorted(found)

    def _claim(self, found: Iterable[int], blocks: list[int]) -> None:
        for block in found:
            if self._empty[block]:
                self._empty[block] = 0
                self._num_empty -= 1
            else:
                self._evict(block)
            self._holders[block] = 1
            blocks.append(block)

    def _evict(self, block: int) -> None:
        del self._unheld[block]
        key = self._keys[block]
        assert key is not None
        del self._findable[key]
        self._keys[block] = None
        if self.on_eviction is not None:
            self.on_eviction(key)
