"""Embeddings of images, videos and the like, by content: encoded once, shared between requests, within a memory budget.

A request holds an item from the step that first reads one of its tokens to the step that reads its last; an item that
nobody holds stays as long as there is room, and the one that was let go longest ago leaves first. Room is reserved
before an item is encoded, so a step that was scheduled can always be run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class _Entry:
    num_rows: int
    holders: set[Hashable] = field(default_factory=set)
    rows: Tensor | None = None


class EncoderCache:
    """Who holds which item, and what it was encoded to.

    Args:
        max_rows: Most rows of embeddings, of all items together; a row is one token's.

    Attributes:
        num_encoded: Items that were encoded.
        num_hits: Times that an item was there already when a request began to hold it.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.num_encoded = 0
        self.num_hits = 0
        self._entries: dict[str, _Entry] = {}
        self._unheld: OrderedDict[str, None] = OrderedDict()  # the one let go longest ago first
        self._num_rows = 0

    @property
    def num_rows(self) -> int:
        """Rows reserved or kept now."""
        return self._num_rows

    @property
    def num_held(self) -> int:
        """Items that a request holds; 0 when idle."""
        return len(self._entries) - len(self._unheld)

    def hold(self, holder: Hashable, name: str, num_rows: int) -> bool:
        """Keep an item for a request, and reserve room for it if it is not here. False: what others hold leaves none.

        Args:
            holder: The request; holding an item again changes nothing.
            name: The item's content (`MultiModalFeatureSpec.identifier`).
            num_rows: Its embeddings; at most `max_rows`, or it never fits.
        """
        entry = self._entries.get(name)
        if entry is None:
            if not self._make_room(num_rows):
                return False
            entry = self._entries[name] = _Entry(num_rows)
            self._num_rows += num_rows
        elif holder not in entry.holders and entry.rows is not None:
            self.num_hits += 1
        self._unheld.pop(name, None)
        entry.holders.add(holder)
        return True

    def is_encoded(self, name: str) -> bool:
        """Whether an item that is held has been encoded; if not, its holder's next step does it."""
        return self._entries[name].rows is not None

    def put(self, name: str, rows: Tensor) -> None:
        """The embeddings [num_rows, hidden] of an item that is held.

        Raises ValueError where they are not as many as were reserved: the caller has counted them before.
        """
        entry = self._entries[name]
        if rows.shape[0] != entry.num_rows:
            raise ValueError(f"{rows.shape[0]} rows for an item with room for {entry.num_rows}")
        entry.rows = rows
        self.num_encoded += 1

    def get(self, name: str) -> Tensor:
        """The embeddings of an item that is held and encoded, [num_rows, hidden]."""
        rows = self._entries[name].rows
        assert rows is not None, "an item is encoded in the step that first reads it"
        return rows

    def release(self, holder: Hashable, name: str) -> None:
        """A request needs an item no longer. Harmless where it does not hold it."""
        entry = self._entries.get(name)
        if entry is None or holder not in entry.holders:
            return
        entry.holders.remove(holder)
        if entry.holders:
            return
        if entry.rows is None:  # reserved, and the step that would have encoded it never came
            self._drop(name)
        else:
            self._unheld[name] = None

    def clear(self) -> None:
        """Forget everything, whoever holds it."""
        self._entries.clear()
        self._unheld.clear()
        self._num_rows = 0

    def _make_room(self, num_rows: int) -> bool:
        held = self._num_rows - sum(self._entries[name].num_rows for name in self._unheld)
        if held + num_rows > self.max_rows:
            return False
        while self._num_rows + num_rows > self.max_rows:
            self._drop(next(iter(self._unheld)))
        return True

    def _drop(self, name: str) -> None:
        self._unheld.pop(name, None)
        self._num_rows -= self._entries.pop(name).num_rows
