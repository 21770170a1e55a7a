"""Replicas and packs: how many slots an expert gets, and which slots go together; for many rows (layers) at once."""

from __future__ import annotations

import numpy as np

from torchplug.engine.expert_placement import Floats, Integers


def replicate(weight: Floats, num_slots: int) -> tuple[Integers, Integers]:
    """Give every expert a slot, and each further slot to the expert with the most load per replica.

    Args:
        weight: [rows, experts].
        num_slots: At least the number of experts.

    Returns:
        The expert of each slot, int64 [rows, slots], and the replicas of each expert, int64 [rows, experts].
    """
    rows, num_experts = weight.shape
    row = np.arange(rows)
    replicas = np.tile(np.arange(num_slots, dtype=np.int64), (rows, 1))
    count = np.ones((rows, num_experts), np.int64)
    per_replica = weight.copy()
    for slot in range(num_experts, num_slots):
        heaviest = per_replica.argmax(1)
        replicas[:, slot] = heaviest
        count[row, heaviest] += 1
        per_replica[row, heaviest] = weight[row, heaviest] / count[row, heaviest]
    return replicas, count


def pack(weight: Floats, num_packs: int) -> Integers:
    """Divide the items of each row into packs of equally many items and about equal weight.

    The longest-processing-time rule (the heaviest item that is left goes to the lightest pack that has room), followed
    by exchanges.

    Args:
        weight: [rows, items].
        num_packs: Divides the number of items.

    Returns:
        int64 [rows, items], the items, pack by pack.
    """
    rows, num_items = weight.shape
    size = num_items // num_packs
    if num_packs == 1 or size == 1:
        return np.tile(np.arange(num_items, dtype=np.int64), (rows, 1))
    row = np.arange(rows)
    heaviest_first = np.argsort(-weight, axis=1, kind="stable")
    sorted_weight = np.take_along_axis(weight, heaviest_first, axis=1)
    order = np.empty((rows, num_packs, size), np.int64)
    order[:, :, 0] = heaviest_first[:, :num_packs]
    total = sorted_weight[:, :num_packs].copy()
    fill = np.ones((rows, num_packs), np.int64)
    for item in range(num_packs, num_items):
        lightest = total.argmin(1)
        at = fill[row, lightest]
        order[row, lightest, at] = heaviest_first[:, item]
        fill[row, lightest] = at + 1
        total[row, lightest] += np.where(at + 1 == size, np.inf, sorted_weight[:, item])
    exchange(order, weight)
    return order.reshape(rows, num_items)


def exchange(order: Integers, weight: Floats, tolerance: float = 1e-3, most_rounds: int = 64) -> None:
    """Bring packs nearer to their mean by exchanging items between a heavy and a light pack, in place.

    In a round, the heaviest pack is paired with the lightest, the next with the next, and each pair exchanges the two
    items that bring it nearest to equal weight. A row whose heaviest pack found nothing to exchange shifts the pairing
    by one, until every pairing has been tried in vain.

    Args:
        order: int64 [rows, packs, size], the items of each pack.
        weight: [rows, items].
        tolerance: A row is left alone when its heaviest pack exceeds the mean by no more than this share.
        most_rounds: A bound; a row rarely needs a quarter of it.
    """
    rows, packs, size = order.shape
    half = packs // 2
    items = np.take_along_axis(weight[:, None, :], order, axis=2)
    shift = np.zeros(rows, np.int64)
    active = np.arange(rows)
    for _ in range(most_rounds):
        total = items[active].sum(2)
        uneven = (total.max(1) > (1 + tolerance) * total.mean(1)) & (shift[active] < half)
        active, total = active[uneven], total[uneven]
        if not len(active):
            return
        by_weight = np.argsort(total, axis=1, kind="stable")
        pair = (np.arange(half) + shift[active, None]) % half
        light = np.take_along_axis(by_weight, pair, axis=1)
        heavy = by_weight[:, ::-1][:, :half]
        gap = np.take_along_axis(total, heavy, axis=1) - np.take_along_axis(total, light, axis=1)
        at = active[:, None]
        # Moving half the gap from heavy to light makes the pair equal; what is left of the gap is the miss.
        moved = items[at, heavy][..., :, None] - items[at, light][..., None, :]
        miss = np.abs(moved - gap[..., None, None] / 2).reshape(*gap.shape, -1)
        best = miss.argmin(2)
        gain = np.take_along_axis(miss, best[..., None], axis=2)[..., 0] < (1 - 1e-6) * gap / 2
        gain &= np.take_along_axis(total, heavy, axis=1) > (1 + tolerance) * total.mean(1, keepdims=True)
        shift[active] = np.where(gain[:, 0], 0, shift[active] + 1)
        where, which = np.nonzero(gain)
        row, one, other = active[where], heavy[where, which], light[where, which]
        from_one, from_other = np.divmod(best[where, which], size)
        for values in (order, items):
            values[row, one, from_one], values[row, other, from_other] = (
                values[row, other, from_other],
                values[row, one, from_one],
            )
