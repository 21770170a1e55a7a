"""Which requests take part in a step, and with how many tokens: first come, first served, under a token budget.

Prefill chunks and decodes share a step. Running requests go first, in the order in which they were admitted, so a
decode waits only when the budget is smaller than the number of running requests; then waiting ones are admitted while
slots and budget last.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchplug.engine.request import Request


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part in one step: tokens [start, stop), cached in its slot. `samples`: a new token follows them."""

    request: Request
    slot: int
    start: int
    stop: int
    samples: bool


class Scheduler:
    """Queue and slots.

    Args:
        max_num_seqs: Slots: most requests that run at once.
        max_num_batched_tokens: Most tokens in one step.
        whole_prefix: Without a cache every step needs all of a request's tokens; then the budget does not apply.
        whole_above: A prompt of more tokens than this is computed in one step (`depends_on_length` of a layer); it
            waits, first in line, until a step has room for it. None: any prompt may be cut.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        whole_prefix: bool = False,
        whole_above: int | None = None,
    ) -> None:
        self._budget = max_num_batched_tokens
        self._whole_prefix = whole_prefix
        self._whole_above = whole_above
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        # One write owns a slot and one write frees it, so an interrupt at any point can neither leak a slot nor free
        # it twice.
        self._owners: list[Request | None] = [None] * max_num_seqs

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that own a slot."""
        return len(self._running)

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody owns."""
        return self._owners.count(None)

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its slot. Harmless for one that is not here."""
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        if request in self._owners:
            self._owners[self._owners.index(request)] = None

    def schedule(self) -> list[Scheduled]:
        """The next step's batch; empty when there is nothing to do."""
        batch: list[Scheduled] = []
        budget = self._budget
        for request in self._running:
            if not budget:
                return batch
            budget -= self._take(request, budget, batch)
        while self._waiting and budget and None in self._owners:
            if self._is_whole(self._waiting[0]) and len(self._waiting[0].token_ids) > budget:
                break
            request = self._waiting.popleft()
            request.slot = self._owners.index(None)  # low slots first keep the cache small
            self._owners[request.slot] = request
            self._running.append(request)
            budget -= self._take(request, budget, batch)
        return batch

    def _is_whole(self, request: Request) -> bool:
        return self._whole_above is not None and len(request.token_ids) > self._whole_above

    def _take(self, request: Request, budget: int, batch: list[Scheduled]) -> int:
        """Schedule as much of a request as the budget allows; returns the tokens taken out of the budget."""
        slot, end = request.slot, len(request.token_ids)
        assert slot is not None
        if self._whole_prefix:
            batch.append(Scheduled(request, slot, 0, end, True))
            return 0
        start = request.num_computed
        stop = min(end, start + budget)
        batch.append(Scheduled(request, slot, start, stop, stop == end))
        return stop - start
