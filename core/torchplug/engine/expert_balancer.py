"""The load balancer at work: after each step it counts, and from time to time it moves experts, some layers a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from torchplug.engine.eplb_policy import rebalance
from torchplug.engine.eplb_state import EplbState
from torchplug.engine.expert_movement import (
    bytes_of_expert,
    check_expert_weights,
    move_layer,
    plan_of_rank,
    plan_transfers,
)
from torchplug.engine.expert_placement import Integers, Placement, balance, rank_loads
from torchplug.engine.process_group import meet, rank_and_size
from torchplug.errors import ParallelConfigError, Problem


@dataclass(slots=True)
class RebalanceReport:
    """What one rebalance did.

    Attributes:
        balance_before: Mean over max of the ranks' loads, averaged over layers, for the window's load where the experts
            were.
        balance_after: The same where they are now.
        num_layers: Layers whose experts changed places.
        num_slots: Slots of all ranks that got another expert.
        bytes_sent: By this rank to others.
        bytes_received: By this rank from others.
        policy_seconds: Adding up the load and computing the new placement.
        move_seconds: Moving the weights, on this rank.
        done: All layers have been moved.
    """

    balance_before: float
    balance_after: float
    num_layers: int
    num_slots: int
    bytes_sent: int = 0
    bytes_received: int = 0
    policy_seconds: float = 0.0
    move_seconds: float = 0.0
    done: bool = False


class ExpertBalancer:
    """Balances the experts of one model over the ranks of its group.

    Args:
        state: The model's maps and load; its layers hold them already (`set_eplb_state`).
        expert_weights: Per layer, the expert tensors of this rank: MixtureOfExperts.expert_weights.
        layers_per_step: Layers that are moved between two steps while a rebalance is under way.

    Attributes:
        last: The latest rebalance, or None.

    Raises:
        ContractError: The rows of a tensor are not the slots of this rank.
        ParallelConfigError: The group has not as many ranks as the layout, or `layers_per_step` is not positive.
    """

    def __init__(
        self, state: EplbState, expert_weights: Sequence[Sequence[Tensor]], *, layers_per_step: int = 1
    ) -> None:
        self.rank, size = rank_and_size(state.group)
        if size != state.layout.num_ranks:
            says = f"the layout is for {state.layout.num_ranks} ranks, the group has {size}"
            raise ParallelConfigError("expert load balancer", Problem("num_ranks", says, "make both the same"))
        if layers_per_step < 1:
            problem = Problem("layers_per_step", f"{layers_per_step} layers", "use at least 1")
            raise ParallelConfigError("expert load balancer", problem)
        check_expert_weights(expert_weights, state.layout)
        self.state = state
        self.last: RebalanceReport | None = None
        self._weights = expert_weights
        self._layers_per_step = layers_per_step
        self._target = state.placement
        self._pending: deque[int] = deque()

    def end_step(self, *, counts: bool = True) -> None:
        """To be called after every forward pass, on every rank.

        Args:
            counts: False for a dummy step (see `EplbState.end_step`).

        Raises:
            DistributedError: Another rank died or did not answer; no layer is half moved.
        """
        due = self.state.end_step(counts=counts)
        if self._pending:
            self._move(min(self._layers_per_step, len(self._pending)))
        elif due:
            self.start()

    def start(self) -> None:
        """Decide on a new placement from the window's load. Its layers are moved by the steps that follow."""
        begin = time.perf_counter()
        state = self.state
        load = state.logical_load()
        current = state.placement
        self._target = rebalance(load, state.layout, current.physical_to_logical)
        changed = self._target.physical_to_logical != current.physical_to_logical
        self._pending = deque(np.flatnonzero(changed.any(1)).tolist())
        self.last = RebalanceReport(
            balance_before=self._balance(load, current),
            balance_after=self._balance(load, self._target),
            num_layers=len(self._pending),
            num_slots=int(changed.sum()),
            policy_seconds=time.perf_counter() - begin,
            done=not self._pending,
        )

    def finish(self) -> None:
        """Move all layers that are left of a rebalance under way."""
        self._move(len(self._pending))

    def _move(self, num_layers: int) -> None:
        report = self.last
        if report is None or not num_layers:
            return
        begin = time.perf_counter()
        if self.state.layout.num_ranks > 1:
            with meet(self.state.group, "moving experts between ranks", self.state.timeout):
                pass
        for _ in range(num_layers):
            layer = self._pending[0]
            old, new = (each.physical_to_logical[layer] for each in (self.state.placement, self._target))
            transfers = plan_transfers(old, new, self.state.layout)
            move = plan_of_rank(transfers, old, new, self.state.layout, self.rank)
            move_layer(self._weights[layer], move, self.state.group, self.state.timeout)
            self.state.commit(self._target, [layer])
            self._pending.popleft()
            size = bytes_of_expert(self._weights[layer])
            report.bytes_sent += len(move.sends) * size
            report.bytes_received += len(move.receives) * size
        report.move_seconds += time.perf_counter() - begin
        report.done = not self._pending

    def _balance(self, load: Integers, placement: Placement) -> float:
        return float(balance(rank_loads(load, placement, self.state.layout)).mean())
