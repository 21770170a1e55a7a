"""Which states are kept for later requests, at which tokens, and who starts from one.

A request's own state is in the slot of its row while it runs, and is written in place. At a checkpoint it is copied out
to a slot of the snapshot pool, registered under the key of the block that ends there; a request that hits copies it
into its own slot before its first step. The runner carries the copies out at the beginning of a step, in batch order.

Checkpoints lie on block boundaries and prefill is cut there. Where they lie decides what can hit: a state after tokens
that no other request has is worth nothing (vLLM issue 45238). They are taken

* before the prompt's last token, for the same prompt again;
* where the prompt parts from others, waiting or seen before, so that what they share hits (branch points; Pan et al.,
  Marconi, MLSys 2025, section 4);
* every `SPACING` tokens, for a prompt whose beginning nobody has shared yet;
* at each boundary that decoding passes, where only a request's latest is kept: the next turn of a conversation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torchplug.engine.block_pool import BlockKey, BlockPool

if TYPE_CHECKING:
    from torchplug.engine.request import Request

SPACING: Final = 512
"""Tokens between two checkpoints of a prompt at most; so long a chunk keeps matrix products efficient."""

_BRANCHES: Final = 3
"""Branch points of one prompt that are cut at most, the last ones: each costs a step."""

_SEEN: Final = 1 << 14
"""Blocks of prompts that are remembered, about 10 MB."""


class Checkpoints:
    """One running request's dealings with the snapshot pool.

    Attributes:
        source: The snapshot that the next step copies to the request's slot; None: nothing to copy.
        target: The snapshot to which the next step copies the request's slot; None: nothing to copy.
        planned: (tokens, key) where prefill is cut and the state is kept, the next one first.
        end: Tokens that it had when it was admitted: what follows them is decoded.
        latest: Its snapshot of the last boundary in decoding, and the key of it.
    """

    __slots__ = ("end", "latest", "planned", "source", "target")

    def __init__(self, source: int | None, planned: list[tuple[int, BlockKey]], end: int) -> None:
        self.source = source
        self.target: int | None = None
        self.planned = planned
        self.end = end
        self.latest: tuple[int, BlockKey] | None = None


class StateSnapshots:
    """The snapshots of recurrent states.

    Args:
        num_snapshots: Slots there are for them.
        block_size: Tokens of a block; snapshots lie on its boundaries.
        key: The key of a request's block of that index.

    Attributes:
        pool: The slots, counted from 0; a registered one keeps the state after the tokens of its key's whole chain.
    """

    def __init__(self, num_snapshots: int, block_size: int, key: Callable[[Request, int], BlockKey]) -> None:
        self.pool = BlockPool(num_snapshots)
        self._block_size = block_size
        self._key = key
        self._coming: dict[BlockKey, Request] = {}  # snapshots that running requests will take
        # Blocks of prompts, and of how many; the oldest first.
        self._seen: OrderedDict[BlockKey, tuple[BlockKey, int]] = OrderedDict()

    def announce(self, request: Request, num_blocks: int) -> None:
        """Remember the first blocks of a prompt that waits from now on."""
        for index in range(num_blocks):
            key = self._key(request, index)
            known, count = self._seen.pop(key, (key, 0))
            # The first one's key object: what is built on it compares by identity.
            request.block_keys[index] = known
            self._seen[known] = known, count + 1
        while len(self._seen) > _SEEN:
            self._seen.popitem(last=False)

    def num_seen(self, request: Request, num_blocks: int) -> int:
        """How many of a prompt's first blocks other prompts have had too."""
        return next((index for index in range(num_blocks) if self._count(request, index) < 2), num_blocks)

    def find(self, key: BlockKey) -> int | None:
        """The snapshot after that block; it stays where it is until `admit`."""
        return self.pool.find(key)

    def is_coming(self, key: BlockKey) -> bool:
        """Whether a running request is about to take that snapshot."""
        request = self._coming.get(key)
        # An interrupt may have left the entry of one that runs no more.
        return request is not None and request.checkpoints is not None

    def admit(self, request: Request, start: int, source: int | None, most: int) -> None:
        """Let a request start after `start` tokens from snapshot `source` (None: from nothing), and plan its own
        checkpoints, none of which lies after `most` tokens."""
        if source is not None:
            self.pool.hold([source])
        planned = self._plan(request, start, most)
        for _, key in planned:
            self._coming.setdefault(key, request)
        request.checkpoints = Checkpoints(source, planned, len(request.token_ids))

    def advance(self, request: Request, most: int) -> None:
        """Before a running request's next step: the last step's copies are done, and where that step ended at a
        checkpoint its state is kept; not after `most` tokens."""
        own, at = request.checkpoints, request.num_computed
        assert own is not None
        self._settle(own)
        decoding = at >= own.end
        if not at or at % self._block_size or at > most or not (decoding or any(at == each for each, _ in own.planned)):
            return
        while own.planned and own.planned[0][0] <= at:
            self._forget_coming(request, own.planned.pop(0)[1])
        key = self._key(request, at // self._block_size - 1)  # not the planned one: a wrapper may have come since
        if decoding:
            self._discard_latest(own)
        if self.pool.find(key) is not None or not self.pool.num_available:
            return
        (own.target,) = self.pool.allocate(1)
        self.pool.register(own.target, key)
        if decoding:
            own.latest = own.target, key

    def next_cut(self, request: Request) -> int | None:
        """Where the next step of a request must end at the latest."""
        assert request.checkpoints is not None
        return next((place for place, _ in request.checkpoints.planned if place > request.num_computed), None)

    def free(self, request: Request) -> None:
        """The request stops running. Harmless for one that does not."""
        own, request.checkpoints = request.checkpoints, None
        if own is not None:
            self._settle(own)
            for _, key in own.planned:
                self._forget_coming(request, key)

    def forget(self, key: BlockKey) -> None:
        """The block of that key left the cache of an attention layer: its snapshot goes with it."""
        slot = self.pool.find(key)
        if slot is not None:
            self.pool.unregister(slot)

    def reset(self) -> None:
        """Every slot is empty. No request may run."""
        self.pool.reset()
        self._coming.clear()

    def _settle(self, own: Checkpoints) -> None:
        self.pool.release([slot for slot in (own.source, own.target) if slot is not None])
        own.source = own.target = None

    def _discard_latest(self, own: Checkpoints) -> None:
        if own.latest is not None:
            slot, key = own.latest
            if self.pool.key(slot) is key and not self.pool.is_held(slot):
                self.pool.unregister(slot)
            own.latest = None

    def _forget_coming(self, request: Request, key: BlockKey) -> None:
        if self._coming.get(key) is request:
            del self._coming[key]

    def _plan(self, request: Request, start: int, most: int) -> list[tuple[int, BlockKey]]:
        size, num_tokens = self._block_size, len(request.token_ids)
        spacing = max(SPACING // size, 1) * size
        places = {
            (num_tokens - 1) // size * size,
            *range(spacing, num_tokens, spacing),
            *self._branches(request, start),
        }
        return [
            (place, self._key(request, place // size - 1))
            for place in sorted(places)
            if start < place <= min(most, num_tokens)
        ]

    def _count(self, request: Request, index: int) -> int:
        """How many prompts had this block."""
        found = self._seen.get(self._key(request, index))
        return 0 if found is None else found[1]

    def _branches(self, request: Request, start: int) -> list[int]:
        """Where fewer prompts go on as this one does than came so far."""
        size = self._block_size
        full = request.num_prompt_tokens // size
        counts = [self._count(request, index) for index in range(start // size, full)]
        return [
            (start // size + index + 1) * size
            for index, (count, following) in enumerate(zip(counts, [*counts[1:], 0], strict=False))
            if count > max(following, 1)
        ][-_BRANCHES:]
