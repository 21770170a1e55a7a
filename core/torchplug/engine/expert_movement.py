"""Moving the weights of experts between slots and ranks, one layer at a time.

What every rank sends and receives follows from the two maps alone, so the ranks need not agree on anything. A slot
whose expert stays is not touched; an expert that the rank had in another slot is copied; every other one comes from a
rank that had it, once, however many slots of the rank it goes to. Nothing is written before all of a layer's rows have
arrived, so a failure leaves the layer as it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from torchplug.engine.expert_placement import ExpertLayout, Integers
from torchplug.engine.process_group import PATIENCE, lost, reason
from torchplug.errors import ContractError, Problem


@dataclass(frozen=True, slots=True)
class Transfer:
    """One expert's rows on their way from rank `source`, where they are in local slot `slot`, to rank `target`."""

    expert: int
    source: int
    slot: int
    target: int


@dataclass(frozen=True, slots=True)
class RankMove:
    """What one rank does to move a layer.

    Attributes:
        sends: (local slot, rank it goes to), in the order of the messages.
        kept: Local slots whose rows are needed in other slots of this rank.
        receives: The rank that each row comes from, in the order of the messages.
        writes: (local slot, index of the row among `kept` and then `receives`).
    """

    sends: tuple[tuple[int, int], ...]
    kept: tuple[int, ...]
    receives: tuple[int, ...]
    writes: tuple[tuple[int, int], ...]


def plan_transfers(old: Integers, new: Integers, layout: ExpertLayout) -> tuple[Transfer, ...]:
    """What goes from rank to rank when a layer changes from one map to another.

    A row comes from the same node where it can, and from the rank that has sent least so far.

    Args:
        old: int64 [physical], the expert of each slot now.
        new: int64 [physical], the expert of each slot afterwards.
        layout: The counts.
    """
    size = layout.num_local_physical
    old_slots, new_slots = old.tolist(), new.tolist()
    held = [set(old_slots[start : start + size]) for start in range(0, len(old_slots), size)]
    needs: dict[tuple[int, int], None] = {}
    for slot in np.flatnonzero(old != new).tolist():
        if new_slots[slot] not in held[slot // size]:
            needs[new_slots[slot], slot // size] = None
    holders: defaultdict[int, list[int]] = defaultdict(list)
    wanted = {expert for expert, _ in needs}
    for slot, expert in enumerate(old_slots):
        if expert in wanted:
            holders[expert].append(slot)
    sent = [0] * layout.num_ranks
    transfers = []
    # Those that only one rank can send come first, so that the others can go around them.
    for expert, target in sorted(needs, key=lambda need: (len(holders[need[0]]), need)):
        node = target // layout.ranks_per_node

        def cost(slot: int, node: int = node) -> tuple[bool, int, int]:
            rank = slot // size
            return rank // layout.ranks_per_node != node, sent[rank], slot

        slot = min(holders[expert], key=cost)
        sent[slot // size] += 1
        transfers.append(Transfer(expert, slot // size, slot % size, target))
    return tuple(transfers)


def plan_of_rank(
    transfers: Sequence[Transfer], old: Integers, new: Integers, layout: ExpertLayout, rank: int
) -> RankMove:
    """One rank's part in what `plan_transfers` planned for the same maps."""
    size = layout.num_local_physical
    had, gets = (slots[rank * size : (rank + 1) * size].tolist() for slots in (old, new))
    arriving = [transfer for transfer in transfers if transfer.target == rank]
    changed = [slot for slot in range(size) if had[slot] != gets[slot]]
    first_slot = {expert: slot for slot, expert in reversed(list(enumerate(had)))}
    kept = dict.fromkeys(gets[slot] for slot in changed if gets[slot] in first_slot)
    row_of = {expert: row for row, expert in enumerate([*kept, *(transfer.expert for transfer in arriving)])}
    return RankMove(
        sends=tuple((transfer.slot, transfer.target) for transfer in transfers if transfer.source == rank),
        kept=tuple(first_slot[expert] for expert in kept),
        receives=tuple(transfer.source for transfer in arriving),
        writes=tuple((slot, row_of[gets[slot]]) for slot in changed),
    )


def check_expert_weights(weights: Sequence[Sequence[Tensor]], layout: ExpertLayout) -> None:
    """Find out before anything is moved whether rows of all tensors are the slots of this rank.

    Args:
        weights: Per layer, its expert tensors, as MixtureOfExperts.expert_weights.

    Raises:
        ContractError: naming every tensor whose first dimension is not the number of local slots, or which is not
            contiguous.
    """
    problems = []
    for layer, tensors in enumerate(weights):
        for index, tensor in enumerate(tensors):
            where = f"expert_weights[{layer}][{index}]"
            if tensor.dim() < 1 or tensor.shape[0] != layout.num_local_physical:
                says = f"expected [{layout.num_local_physical}, ...], a row for each slot here, found"
                fix = "keep what is not per expert, and what belongs to other ranks, out of get_expert_weights()"
                problems.append(Problem(where, f"{says} {list(tensor.shape)}", fix))
            elif not tensor.is_contiguous():
                says = f"is not contiguous: strides {tensor.stride()} of {list(tensor.shape)}"
                problems.append(Problem(where, says, "store it contiguously, one expert after the other"))
    if problems:
        raise ContractError("expert weights", problems)


def bytes_of_expert(tensors: Sequence[Tensor]) -> int:
    """The bytes of one expert's rows in a layer."""
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)


def move_layer(
    tensors: Sequence[Tensor],
    move: RankMove,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta = PATIENCE,
) -> None:
    """Carry out a rank's part: the rows of all tensors of one layer, in place.

    Every rank of the group whose part is not empty has to do this at the same time, for the same layer.

    Args:
        tensors: The layer's expert tensors [local slots, ...], contiguous.
        move: The part of this rank.
        group: The expert-parallel group; None for the default one.
        timeout: How long a row may take to come.

    Raises:
        DistributedError: naming the rank that did not send or take its rows; the tensors are as they were.
    """
    staged = []
    messages: list[_Message] = []
    for tensor in tensors:
        rows = tensor.detach().view(tensor.shape[0], -1)
        stage = rows.new_empty(len(move.kept) + len(move.receives), rows.shape[1])
        if move.kept:
            stage[: len(move.kept)] = rows[list(move.kept)]
        staged.append((rows, stage))
        # As bytes: a backend need not know the dtype.
        for slot, target in move.sends:
            messages.append(_Message("to", target, rows[slot].view(torch.uint8)))
        for index, source in enumerate(move.receives, len(move.kept)):
            messages.append(_Message("from", source, stage[index].view(torch.uint8)))
    _exchange(messages, group, timeout)
    slots, source_rows = [slot for slot, _ in move.writes], [row for _, row in move.writes]
    if slots:
        for rows, stage in staged:
            rows[slots] = stage[source_rows]


class _Message(NamedTuple):
    way: Literal["to", "from"]
    peer: int
    row: Tensor


def _exchange(messages: list[_Message], group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Send and receive all of it, and name the rank with which that failed."""
    if messages and dist.get_backend(group) == "nccl":
        # All in one, or two ranks that send to each other would wait for each other; one handle stands for all.
        operations = [
            dist.P2POp(dist.isend if each.way == "to" else dist.irecv, each.row, group=group, group_peer=each.peer)
            for each in messages
        ]
        with _blaming(messages, group):
            for handle in dist.batch_isend_irecv(operations):
                handle.wait()
        return
    works = []
    for each in messages:
        with _blaming([each], group):
            works.append(
                dist.isend(each.row, group=group, group_dst=each.peer)
                if each.way == "to"
                else dist.irecv(each.row, group=group, group_src=each.peer)
            )
    for work, each in zip(works, messages, strict=True):
        if work is not None:
            with _blaming([each], group):
                work.wait(timeout)


@contextmanager
def _blaming(messages: Sequence[_Message], group: dist.ProcessGroup | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        whom = " or ".join(sorted({f"{each.way} rank {each.peer}" for each in messages}))
        says = f"the rows {whom} did not come through: {reason(error)}"
        raise lost(group, "moving experts between ranks", says) from error
