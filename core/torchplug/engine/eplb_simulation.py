"""What the load balancer would do with a trace: balance before and after, and what it would move and cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from torchplug.engine.eplb_policy import rebalance
from torchplug.engine.expert_movement import plan_transfers
from torchplug.engine.expert_placement import ExpertLayout, Placement, rank_loads
from torchplug.engine.load_trace import LoadTrace
from torchplug.errors import Problem, RequestError


@dataclass(frozen=True, slots=True)
class Interval:
    """The steps between two rebalances, and the rebalance before them.

    Balance is the time that the ranks would need if every step and layer were even, over the time that they need: the
    sum of mean loads over the sum of greatest loads. Its inverse is how many times as long a step's experts take.

    Attributes:
        first_step: Of the trace.
        num_steps: Steps.
        balance_before: Were the experts where they are without a balancer.
        balance_after: Where the rebalance has put them, from the load of the interval before; the first interval has
            none.
        slots_changed: Slots of all ranks and layers that got another expert.
        bytes_moved: Between ranks, in all.
        bytes_between_nodes: Of these, from one node to another.
        most_bytes_of_rank: Sent or received by the busiest rank.
        policy_seconds: To compute the placement, measured.
        plan_seconds: To plan the transfers of all layers, measured.
    """

    first_step: int
    num_steps: int
    balance_before: float
    balance_after: float
    slots_changed: int
    bytes_moved: int
    bytes_between_nodes: int
    most_bytes_of_rank: int
    policy_seconds: float
    plan_seconds: float


def simulate(trace: LoadTrace, layout: ExpertLayout, step_interval: int, expert_bytes: int) -> Iterator[Interval]:
    """Go through a trace with a rebalance after every interval.

    Args:
        trace: The load of the experts.
        layout: The counts.
        step_interval: Steps between two rebalances; the load of all of them counts.
        expert_bytes: Bytes of one expert of one layer.

    Raises:
        RequestError: The trace has another number of experts than the layout.
    """
    _, num_layers, num_experts = trace.shape
    if num_experts != layout.num_logical:
        says = f"the trace has {num_experts} experts, the layout {layout.num_logical}"
        raise RequestError("trace of expert load", Problem("", says, "leave the number of experts to the trace"))
    initial = Placement.initial(num_layers, layout)
    placement, first_step, window = initial, 0, None
    for load in trace.chunks(step_interval):
        begin = time.perf_counter()
        before = placement
        if window is not None:
            placement = rebalance(window, layout, before.physical_to_logical)
        decided = time.perf_counter()
        between, busiest, changed, count = _moves(before, placement, layout)
        planned = time.perf_counter()
        yield Interval(
            first_step,
            len(load),
            _balance(load, initial, layout),
            _balance(load, placement, layout),
            changed,
            count * expert_bytes,
            between * expert_bytes,
            busiest * expert_bytes,
            decided - begin if window is not None else 0.0,
            planned - decided if window is not None else 0.0,
        )
        window = load.sum(0, dtype=np.int64)
        first_step += len(load)


def _moves(before: Placement, after: Placement, layout: ExpertLayout) -> tuple[int, int, int, int]:
    """Rows between nodes, most rows of one rank in one direction, slots that change, and rows between ranks."""
    between = count = 0
    sent, received = [0] * layout.num_ranks, [0] * layout.num_ranks
    changed = before.physical_to_logical != after.physical_to_logical
    for layer in np.flatnonzero(changed.any(1)).tolist():
        rows = before.physical_to_logical[layer], after.physical_to_logical[layer]
        for transfer in plan_transfers(*rows, layout):
            count += 1
            between += transfer.source // layout.ranks_per_node != transfer.target // layout.ranks_per_node
            sent[transfer.source] += 1
            received[transfer.target] += 1
    return between, max(*sent, *received), int(changed.sum()), count


def _balance(load: np.ndarray, placement: Placement, layout: ExpertLayout) -> float:
    loads = rank_loads(load, placement, layout)
    most = float(loads.max(-1).sum())
    return float(loads.mean(-1).sum()) / most if most else 1.0
