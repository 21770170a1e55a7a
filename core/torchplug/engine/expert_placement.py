"""Which logical expert each physical slot holds: the counts that must divide, the maps, and how balanced they are.

A logical expert is one of the checkpoint's, a physical expert is a copy of it in a slot. Slot `s` lives on rank
`s // num_local_physical`, and the ranks of a node are consecutive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchplug.errors import ParallelConfigError, Problem

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The counts of one model's expert layers over an expert-parallel group.

    Attributes:
        num_logical: Experts of a layer, as the router numbers them.
        num_physical: Slots of a layer over all ranks; the difference to `num_logical` is redundancy.
        num_ranks: Processes of the expert-parallel group.
        num_groups: Groups of which the router chooses some before it chooses experts; 1 where there are none.
        num_nodes: Machines; traffic within one is cheaper.

    Raises:
        ParallelConfigError: The counts do not divide; the text names them, and the redundancy that would fit.
    """

    num_logical: int
    num_physical: int
    num_ranks: int = 1
    num_groups: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ParallelConfigError("expert layout", problems)

    @property
    def num_redundant(self) -> int:
        """Slots of a layer beyond one for each logical expert."""
        return self.num_physical - self.num_logical

    @property
    def num_local_physical(self) -> int:
        """Slots of a layer on one rank."""
        return self.num_physical // self.num_ranks

    @property
    def ranks_per_node(self) -> int:
        """Processes on one machine."""
        return self.num_ranks // self.num_nodes

    @property
    def most_replicas(self) -> int:
        """The most slots that one expert can have while every other one has its own."""
        return self.num_redundant + 1

    @property
    def hierarchical(self) -> bool:
        """Whether whole groups can be given to nodes, so that a token's experts are on few machines."""
        return self.num_nodes > 1 and self.num_groups % self.num_nodes == 0


def _problems(layout: ExpertLayout) -> Iterator[Problem]:
    """Everything that is wrong with the counts."""
    counts = {
        "logical experts": layout.num_logical,
        "ranks": layout.num_ranks,
        "expert groups": layout.num_groups,
        "nodes": layout.num_nodes,
    }
    below = [f"{count} {name}" for name, count in counts.items() if count < 1]
    if below:
        yield Problem("counts", f"{', '.join(below)}: each must be at least 1", "correct the count")
        return
    logical, ranks = layout.num_logical, layout.num_ranks
    if layout.num_redundant < 0:
        says = f"{layout.num_physical} physical experts cannot hold {logical} logical ones"
        yield Problem("num_physical_experts", says, _redundancy_that_fits(logical, 0, ranks))
    elif layout.num_physical % ranks:
        says = (
            f"{logical} logical + {layout.num_redundant} redundant = {layout.num_physical} physical experts do not"
            f" divide over {ranks} ranks"
        )
        yield Problem("num_redundant_experts", says, _redundancy_that_fits(logical, layout.num_redundant, ranks))
    if logical % layout.num_groups:
        says = f"{logical} logical experts do not divide into {layout.num_groups} groups"
        yield Problem("num_expert_groups", says, "take the number of groups from the checkpoint's config")
    if ranks % layout.num_nodes:
        says = f"{ranks} ranks do not divide over {layout.num_nodes} nodes"
        yield Problem("num_nodes", says, "every node must run the same number of ranks")


def _redundancy_that_fits(logical: int, redundant: int, ranks: int) -> str:
    """The nearest numbers of redundant experts below and above with which the slots divide over the ranks."""
    least = -logical % ranks
    below = redundant - (logical + redundant) % ranks
    fitting = sorted({max(below, least), max(below, least) + ranks})
    shown = " or ".join(f"{each} ({(logical + each) // ranks} slots a rank)" for each in fitting)
    return f"use {shown} redundant experts"


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The three maps of all expert layers; they say the same.

    Attributes:
        physical_to_logical: int64 [layers, physical], the expert in each slot.
        logical_to_physical: int64 [layers, logical, most replicas], the slots of each expert, ascending; -1 where
            unused.
        replica_count: int64 [layers, logical], how many of them are in use.
    """

    physical_to_logical: Integers
    logical_to_physical: Integers
    replica_count: Integers

    @classmethod
    def of(cls, physical_to_logical: Integers, layout: ExpertLayout) -> Placement:
        """The maps that belong to the experts of all slots: int64 [layers, physical]. Every expert has a slot."""
        layers, num_physical = physical_to_logical.shape
        rows = np.arange(layers)[:, None]
        count = count_replicas(physical_to_logical, layout.num_logical)
        # Slots by expert, ascending within each; what comes before an expert's first slot tells a slot's number.
        slots = np.argsort(physical_to_logical, axis=1, kind="stable")
        experts = np.take_along_axis(physical_to_logical, slots, axis=1)
        first = np.cumsum(count, axis=1) - count
        number = np.arange(num_physical) - np.take_along_axis(first, experts, axis=1)
        slots_of = np.full((layers, layout.num_logical, layout.most_replicas), -1, np.int64)
        slots_of[rows, experts, number] = slots
        return cls(physical_to_logical, slots_of, count)

    def take(self, other: Placement, layer: int) -> None:
        """Make one layer the same as in `other`, in place."""
        self.physical_to_logical[layer] = other.physical_to_logical[layer]
        self.logical_to_physical[layer] = other.logical_to_physical[layer]
        self.replica_count[layer] = other.replica_count[layer]

    @classmethod
    def initial(cls, num_layers: int, layout: ExpertLayout) -> Placement:
        """Before any load is known: slot i holds expert i, and the redundant slots begin again at expert 0."""
        row = np.arange(layout.num_physical, dtype=np.int64) % layout.num_logical
        return cls.of(np.tile(row, (num_layers, 1)), layout)


def count_replicas(experts: Integers, num_logical: int) -> Integers:
    """How often each expert occurs in each row: int64 [..., slots] -> int64 [..., logical]."""
    flat = experts.reshape(-1, experts.shape[-1])
    in_row = flat + num_logical * np.arange(len(flat))[:, None]
    counts = np.bincount(in_row.ravel(), minlength=len(flat) * num_logical)
    return counts.astype(np.int64, copy=False).reshape(*experts.shape[:-1], num_logical)


def rank_loads(load: NDArray[Any], placement: Placement, layout: ExpertLayout) -> Floats:
    """What each rank computes, where an expert's tokens are spread evenly over its replicas.

    Args:
        load: [..., layers, logical], tokens of each expert.
        placement: Where the experts are.
        layout: Their counts.

    Returns:
        float64 [..., layers, ranks].
    """
    of_replica = load / placement.replica_count
    slots = np.broadcast_to(placement.physical_to_logical, (*load.shape[:-1], layout.num_physical))
    of_slot = np.take_along_axis(of_replica, slots, axis=-1)
    loads: Floats = of_slot.reshape(*load.shape[:-1], layout.num_ranks, -1).sum(-1)
    return loads


def balance(loads: Floats) -> Floats:
    """Mean over max of the ranks' loads [..., ranks], in (0, 1]; 1 is perfect. A layer without any load is balanced."""
    most = loads.max(-1)
    return np.where(most > 0, loads.mean(-1) / np.where(most > 0, most, 1), 1.0)
