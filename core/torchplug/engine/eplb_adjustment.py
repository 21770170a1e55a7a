"""Staying near the placement in force: every slot whose expert changes is a weight to be moved.

Two ways. `with_fewest_changes` takes any placement and only renames: packs of experts go to the nodes and ranks that
hold most of them already, and an expert that stays on its rank stays in its slot. `adjusted` starts at the placement in
force: replicas that the load no longer asks for make room for those that it does, and then ranks exchange experts until
they are even.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchplug.engine.expert_packing import exchange, replicate
from torchplug.engine.expert_placement import ExpertLayout, Floats, Integers, count_replicas


def with_fewest_changes(slots: Integers, current: Integers, layout: ExpertLayout) -> Integers:
    """`slots` with nodes, ranks within a node, and slots within a rank renamed so that few differ from `current`.

    Args:
        slots: int64 [layers, physical], the expert of each slot of a new placement.
        current: The same of the one in force.
        layout: The counts.

    Returns:
        int64 [layers, physical]; each rank's experts are those of one rank of `slots`.
    """
    layers = len(slots)
    nodes = layout.num_nodes if layout.hierarchical else 1
    new, old = (each.reshape(layers, nodes, -1) for each in (slots, current))
    new = _matched_packs(new, old, layout.num_logical)
    shape = (layers * nodes, layout.num_ranks // nodes, layout.num_local_physical)
    new = _matched_packs(new.reshape(shape), old.reshape(shape), layout.num_logical)
    return _matched_slots(new, old.reshape(shape)).reshape(slots.shape)


def _matched_packs(new: Integers, old: Integers, num_logical: int) -> Integers:
    """`new` [rows, packs, size] with its packs in the order in which they share most experts with those of `old`.

    Greedy: the two packs that share most are matched first.
    """
    rows, packs, _ = new.shape
    if packs == 1:
        return new
    shared = _num_shared(new, old, num_logical).reshape(rows, -1)
    row = np.arange(rows)
    source = np.empty((rows, packs), np.int64)
    for _ in range(packs):
        to, come = np.divmod(shared.argmax(1), packs)
        source[row, to] = come
        grid = shared.reshape(rows, packs, packs)
        grid[row, to, :] = -1
        grid[row, :, come] = -1
    return np.take_along_axis(new, source[..., None], axis=1)


def _num_shared(new: Integers, old: Integers, num_logical: int) -> NDArray[np.float32]:
    """How many experts each old pack [rows, packs, size] shares with each new one: [rows, old packs, new packs]."""
    counts = [count_replicas(packs, num_logical) for packs in (new, old)]
    shared = np.zeros((new.shape[0], old.shape[1], new.shape[1]), np.float32)
    # min(a, b) is the number of levels that both reach, and a product of matrices counts a level for all pairs.
    for level in range(1, min(count.max() for count in counts) + 1):
        reach_new, reach_old = ((count >= level).astype(np.float32) for count in counts)
        shared += reach_old @ reach_new.swapaxes(1, 2)
    return shared


def _matched_slots(new: Integers, old: Integers) -> Integers:
    """Each pack of `new` [rows, packs, size] reordered: what `old` has too stands where it stands in `old`."""
    same = new[..., :, None] == old[..., None, :]
    # The nth replica of an expert within the pack meets the nth one.
    same &= _occurrence(new)[..., :, None] == _occurrence(old)[..., None, :]
    found, taken = same.any(-1), same.any(-2)
    # Items without a slot of their own, in order, take the slots that nobody has, in order.
    left, free = (np.argsort(each, axis=-1, kind="stable") for each in (found, taken))
    slot_of = np.empty_like(new)
    np.put_along_axis(slot_of, left, free, axis=-1)
    slot_of = np.where(found, same.argmax(-1), slot_of)
    placed = np.empty_like(new)
    np.put_along_axis(placed, slot_of, new, axis=-1)
    return placed


def _occurrence(packs: Integers) -> Integers:
    """For each item [..., size], how many equal ones stand before it."""
    equal = packs[..., :, None] == packs[..., None, :]
    before: Integers = np.tril(equal, -1).sum(-1)
    return before


def adjusted(weight: Floats, layout: ExpertLayout, current: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """The placement in force, changed where `weight` asks for it.

    Args:
        weight: float64 [layers, logical], tokens of each expert.
        layout: The counts.
        current: int64 [layers, physical].

    Returns:
        The expert of each slot, int64 [layers, physical], and for which layers that could be done, bool [layers]: with
        groups on nodes, every expert must be on one node only.
    """
    layers, num_logical = weight.shape
    nodes = layout.num_nodes if layout.hierarchical else 1
    shape = (layers * nodes, layout.num_ranks // nodes, layout.num_local_physical)
    slots = current.reshape(shape[0], -1).copy()
    count = count_replicas(slots, num_logical)
    present = (count > 0).reshape(layers, nodes, num_logical)
    possible = (present.sum(1) == 1).all(1) & (present.sum(2) == num_logical // nodes).all(1)
    if not possible.any():
        return current.copy(), possible
    rows = np.repeat(possible, nodes)
    slots, count = slots[rows], count[rows]
    of_expert = np.repeat(weight[possible], nodes, axis=0)

    experts = np.nonzero(count)[1].reshape(len(count), -1)
    _, wanted_here = replicate(np.take_along_axis(of_expert, experts, axis=1), layout.num_physical // nodes)
    wanted = np.zeros_like(count)
    np.put_along_axis(wanted, experts, wanted_here, axis=1)
    of_replica = of_expert / np.maximum(wanted, 1)
    packs = slots.reshape(len(slots), *shape[1:])
    _replace_replicas(packs, of_replica, count, wanted)
    exchange(packs, of_replica)
    changed = current.reshape(shape[0], -1).copy()
    changed[rows] = packs.reshape(slots.shape)
    return changed.reshape(current.shape), possible


def _replace_replicas(packs: Integers, of_replica: Floats, count: Integers, wanted: Integers) -> None:
    """In place, drop replicas of the experts that have more than wanted and fill their slots with those that have less.

    The heaviest ranks give up theirs first; the heaviest new replica goes to the lightest rank with a free slot.

    Args:
        packs: int64 [rows, ranks, size].
        of_replica: Tokens of one replica of each expert, [rows, logical].
        count: Replicas that each expert has, int64 [rows, logical].
        wanted: Replicas that it shall have.
    """
    rows, _, size = packs.shape
    weights = np.take_along_axis(of_replica[:, None, :], packs, axis=2)
    on_rank = np.repeat(weights.sum(2), size, axis=1)
    flat = packs.reshape(rows, -1)
    # Slots by expert, the lightest rank first: as many of them as are wanted stay.
    by_rank = np.argsort(on_rank, axis=1, kind="stable")
    by_expert = np.argsort(np.take_along_axis(flat, by_rank, axis=1), axis=1, kind="stable")
    order = np.take_along_axis(by_rank, by_expert, axis=1)
    experts = np.take_along_axis(flat, order, axis=1)
    number = np.arange(flat.shape[1]) - np.take_along_axis(np.cumsum(count, axis=1) - count, experts, axis=1)
    free = np.empty_like(flat, bool)
    np.put_along_axis(free, order, number >= np.take_along_axis(wanted, experts, axis=1), axis=1)
    free = free.reshape(packs.shape)

    total = np.where(free, 0, weights).sum(2)
    heaviest_first = np.argsort(-of_replica, axis=1, kind="stable")
    lacking = np.take_along_axis(np.maximum(wanted - count, 0), heaviest_first, axis=1)
    end = np.cumsum(lacking, axis=1)
    for step in range(int(end[:, -1].max())):
        row = np.nonzero(end[:, -1] > step)[0]
        expert = heaviest_first[row, (end[row] <= step).sum(1)]
        rank = np.where(free[row].any(2), total[row], np.inf).argmin(1)
        slot = free[row, rank].argmax(1)
        packs[row, rank, slot] = expert
        free[row, rank, slot] = False
        total[row, rank] += of_replica[row, expert]
