"""Which requests take part in a step, and with how many tokens: first come, first served, under a token budget.

Prefill chunks and decodes share a step. Running requests go first, in the order in which they came, so a decode waits
only when the budget is smaller than the number of running requests; then waiting ones are admitted while slots, blocks
and budget last. When blocks run out, the request that came last gives up its own and waits, first in line, to compute
its tokens again; the one that came first always goes on, so everyone's turn comes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchplug.engine.block_manager import BlockManager
    from torchplug.engine.request import Request


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part in one step: tokens [start, stop). `slot` is its row in the runner's tables. `samples`: a new
    token follows them."""

    request: Request
    slot: int
    start: int
    stop: int
    samples: bool


class Scheduler:
    """Queue and slots.

    Args:
        blocks: Who holds which cache blocks. Every request must fit when it is alone.
        max_num_seqs: Slots: most requests that run at once.
        max_num_batched_tokens: Most tokens in one step.
        whole_prefix: Without a cache every step needs all of a request's tokens; then the budget does not apply.
        whole_above: A prompt of more tokens than this is computed in one step (`depends_on_length` of a layer); it
            waits, first in line, until a step has room for it. None: any prompt may be cut.

    Attributes:
        num_preemptions: How often a request has lost its blocks.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        whole_prefix: bool = False,
        whole_above: int | None = None,
    ) -> None:
        self.num_preemptions = 0
        self._blocks = blocks
        self._budget = max_num_batched_tokens
        self._whole_prefix = whole_prefix
        self._whole_above = whole_above
        self._waiting: OrderedDict[Request, None] = OrderedDict()
        self._running: list[Request] = []  # in the order in which they came
        # One write owns a slot and one write frees it, so an interrupt at any point can neither leak a slot nor free
        # it twice. Blocks that an interrupt leaks come back when nothing runs (see `schedule`).
        self._owners: list[Request | None] = [None] * max_num_seqs

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet, or not now."""
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
        self._waiting[request] = None
        self._blocks.announce(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its slot and blocks. Harmless for one that is not here."""
        if request in self._running:
            self._running.remove(request)
        self._waiting.pop(request, None)
        self._blocks.free(request)
        self._free_slot(request)

    def reset_cache(self) -> None:
        """Forget what is cached, and take back what an interrupt has leaked. No request may run."""
        for request in self._waiting:
            request.blocks = []
            request.checkpoints = None
            request.num_computed = 0
        self._blocks.reset()

    def schedule(self) -> list[Scheduled]:
        """The next step's batch; empty when there is nothing to do."""
        if not self._running and self._blocks.num_held:
            self.reset_cache()
        batch: list[Scheduled] = []
        budget = self._budget
        preemptions = self.num_preemptions
        for request in tuple(self._running):
            if not budget or request.slot is None:  # it lost its blocks to one before it, as all behind it did
                break
            stop = self._stop(request, budget)
            if not self._make_room(request, stop):
                break
            budget -= self._take(request, stop, batch)
        if self.num_preemptions > preemptions:
            return batch
        while self._waiting and budget and None in self._owners:
            request = next(iter(self._waiting))
            if not self._admit(request, budget):
                break
            budget -= self._take(request, self._stop(request, budget), batch)
        return batch

    def _make_room(self, request: Request, stop: int) -> bool:
        """Blocks for a running request up to token `stop`, taken from those that came later where none is left. False:
        it was itself the last to come."""
        while not self._blocks.extend(request, stop):
            if self._blocks.trim(self._running):
                continue
            last = self._running[-1]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self._waiting[request] = None
        self._waiting.move_to_end(request, last=False)
        self._running.remove(request)
        self._blocks.free(request)
        self._free_slot(request)
        request.num_computed = 0

    def _admit(self, request: Request, budget: int) -> bool:
        if self._is_whole(request) and request.num_prompt_tokens > budget:
            return False
        # Spare blocks are kept beside running requests only while nobody else needs them.
        if not self._blocks.admit(request, budget) and not (
            self._blocks.trim(self._running) and self._blocks.admit(request, budget)
        ):
            return False
        slot = self._owners.index(None)
        request.slot = slot
        self._owners[slot] = request
        del self._waiting[request]
        self._running.append(request)
        return True

    def _take(self, request: Request, stop: int, batch: list[Scheduled]) -> int:
        """Schedule a request up to token `stop`; returns the tokens taken out of the budget."""
        slot, end = request.slot, len(request.token_ids)
        assert slot is not None
        if self._whole_prefix:
            batch.append(Scheduled(request, slot, 0, end, True))
            return 0
        start = request.num_computed
        self._blocks.register(request, stop)
        batch.append(Scheduled(request, slot, start, stop, stop == end))
        return stop - start

    def _stop(self, request: Request, budget: int) -> int:
        """How far a request is computed in this step."""
        start = request.num_computed
        stop = min(len(request.token_ids), start + budget)
        cut = self._blocks.next_cut(request)
        if cut is not None:
            stop = min(stop, cut)
        if self._whole_above is None or stop <= self._whole_above:
            return stop
        # Beyond the trained length every token's keys depend on how long the request is at that time. So what was one
        # step the first time, the prompt and then token by token, stays so when it is computed again.
        if self._is_whole(request) and start < request.num_prompt_tokens:
            return request.num_prompt_tokens
        return max(self._whole_above, start + 1)

    def _is_whole(self, request: Request) -> bool:
        return self._whole_above is not None and request.num_prompt_tokens > self._whole_above

    def _free_slot(self, request: Request) -> None:
        slot = request.slot
        if slot is not None and self._owners[slot] is request:
            self._owners[slot] = None
        request.slot = None
