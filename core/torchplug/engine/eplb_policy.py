"""The rebalance policy: from the load of every logical expert to the experts of every slot.

The scheme is that of DeepSeek's EPLB (DeepSeek-V3 technical report, section 3.4; github.com/deepseek-ai/EPLB): whole
expert groups are packed to nodes, replicas are made within a node, and they are packed to its ranks; where groups do
not divide over nodes, all ranks count as one node. Replicas are made for the expert with the most load per replica,
which minimises the greatest load of a slot. Two things are different here. Packing is followed by exchanges between
packs, which brings the ranks nearer to their mean; and a placement in force is changed as little as the balance allows,
since every changed slot is a weight to be moved.

Everything is done for all layers at once, in numpy, and depends on the arguments alone: processes that have the same
load compute the same placement.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchplug.engine.eplb_adjustment import adjusted, with_fewest_changes
from torchplug.engine.expert_packing import pack, replicate
from torchplug.engine.expert_placement import ExpertLayout, Floats, Integers, Placement, balance, rank_loads

WORSE: Final = 0.005
"""What fewer moves may cost: this share of a layer's balance."""


def rebalance(load: NDArray[Any], layout: ExpertLayout, current: Integers | None = None) -> Placement:
    """A placement that balances `load` over the ranks.

    Args:
        load: [layers, logical], tokens of each expert, in any unit; not negative.
        layout: The counts.
        current: int64 [layers, physical], the expert of each slot now. With it, as few slots change as that costs no
            more than WORSE of a layer's balance.

    Returns:
        The placement; every expert has at least one slot.
    """
    weight = np.asarray(load, np.float64)
    if current is None:
        return Placement.of(from_scratch(weight, layout), layout)
    slots, possible = adjusted(weight, layout, current)
    reached = np.where(possible, _balance(weight, slots, layout), 0.0)
    # Most layers are as even as any placement could make them, and need no second one to compare with.
    doubtful = np.flatnonzero(reached < (1 - WORSE) * _most_balance(weight, layout))
    if len(doubtful):
        other = from_scratch(weight[doubtful], layout)
        better = (1 - WORSE) * _balance(weight[doubtful], other, layout) > reached[doubtful]
        chosen = doubtful[better]
        if len(chosen):
            slots[chosen] = with_fewest_changes(other[better], current[chosen], layout)
            reached[chosen] = _balance(weight[chosen], slots[chosen], layout)
    good_as_it_is = possible & (_balance(weight, current, layout) >= (1 - WORSE) * reached)
    slots[good_as_it_is] = current[good_as_it_is]
    return Placement.of(slots, layout)


def _balance(weight: Floats, slots: Integers, layout: ExpertLayout) -> Floats:
    return balance(rank_loads(weight, Placement.of(slots, layout), layout))


def _most_balance(weight: Floats, layout: ExpertLayout) -> Floats:
    """A bound on the balance of each layer: a rank's load is at least that of its heaviest slot."""
    _, count = replicate(weight, layout.num_physical)
    heaviest_slot = (weight / count).max(1)
    mean = weight.sum(1) / layout.num_ranks
    return np.where(heaviest_slot > mean, mean / np.where(heaviest_slot > 0, heaviest_slot, 1), 1.0)


def from_scratch(weight: Floats, layout: ExpertLayout) -> Integers:
    """The expert of each slot, int64 [layers, physical], from the load alone: float64 [layers, logical]."""
    nodes, groups = (layout.num_nodes, layout.num_groups) if layout.hierarchical else (1, 1)
    layers = len(weight)
    group_order = pack(weight.reshape(layers, groups, -1).sum(-1), nodes)
    members = np.arange(layout.num_logical).reshape(groups, -1)
    experts = members[group_order].reshape(layers * nodes, -1)  # a row is a node of a layer from here on
    of_expert = np.take_along_axis(weight, experts.reshape(layers, -1), axis=1).reshape(experts.shape)
    replicas, count = replicate(of_expert, layout.num_physical // nodes)
    order = pack(np.take_along_axis(of_expert / count, replicas, axis=1), layout.num_ranks // nodes)
    slots: Integers = np.take_along_axis(experts, np.take_along_axis(replicas, order, axis=1), axis=1)
    return slots.reshape(layers, layout.num_physical)
