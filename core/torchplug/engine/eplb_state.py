"""What the load balancer knows of one model: the maps that its layers read, and the load of the last steps.

The tensors that layers hold (`expert_load_view`, `logical_to_physical_map`, `logical_replica_count`) are made once and
updated in place.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from torchplug.engine.expert_placement import ExpertLayout, Integers, Placement
from torchplug.engine.process_group import PATIENCE, meet
from torchplug.errors import ParallelConfigError, Problem


class EplbState:
    """Maps and load statistics of one model's expert layers; every rank has the same maps.

    Args:
        layout: The counts of experts, slots and ranks.
        num_layers: Expert layers of the model.
        device: The model's device.
        window_size: Steps whose load counts.
        step_interval: Steps from one rebalance to the next; the first one is due after a quarter of them.
        group: The expert-parallel group; None for the default group, or for none where torch.distributed is not
            initialised.
        timeout: How long a rank waits for the others where it needs them.

    Attributes:
        expert_load_view: int32 [layers, physical], tokens counted in this step; layers add to it.
        logical_to_physical_map: int64 [layers, logical, most replicas], the slots of each expert, -1 where unused.
        logical_replica_count: int64 [layers, logical].
        placement: The same maps on the host.

    Raises:
        ParallelConfigError: The window or the interval is not positive.
    """

    def __init__(
        self,
        layout: ExpertLayout,
        num_layers: int,
        device: torch.device | str,
        *,
        window_size: int = 1000,
        step_interval: int = 3000,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = PATIENCE,
    ) -> None:
        for name, value in (("window_size", window_size), ("step_interval", step_interval)):
            if value < 1:
                problem = Problem(name, f"{value} steps", "use at least 1")
                raise ParallelConfigError("expert load balancer", problem)
        self.layout = layout
        self.num_layers = num_layers
        self.group = group
        self.timeout = timeout
        self.step_interval = step_interval
        self.placement = Placement.initial(num_layers, layout)
        self.expert_load_view = torch.zeros(num_layers, layout.num_physical, dtype=torch.int32, device=device)
        self.logical_to_physical_map = torch.from_numpy(self.placement.logical_to_physical).to(device, copy=True)
        self.logical_replica_count = torch.from_numpy(self.placement.replica_count).to(device, copy=True)
        self._physical_to_logical = torch.from_numpy(self.placement.physical_to_logical).to(device, copy=True)
        self._window = torch.zeros(window_size, *self.expert_load_view.shape, dtype=torch.int32, device=device)
        self._num_recorded = 0
        self._num_steps = step_interval - max(step_interval // 4, 1)

    def end_step(self, *, counts: bool = True) -> bool:
        """Close a step: its load enters the window, and the view begins at zero again.

        Args:
            counts: False for a dummy step. Its load does not count, but every rank has to call this equally often,
                since what follows from it is done together.

        Returns:
            Whether a rebalance is due.
        """
        if counts:
            self._window[self._num_recorded % len(self._window)] = self.expert_load_view
            self._num_recorded += 1
        self.expert_load_view.zero_()
        self._num_steps += 1
        if self._num_steps < self.step_interval:
            return False
        self._num_steps = 0
        return True

    def local_loads(self) -> Tensor:
        """The load of every expert in the steps of the window, the oldest first, as this rank saw it.

        Returns:
            int32 [steps, layers, logical], on the model's device.
        """
        size = len(self._window)
        newest = self._num_recorded % size
        window = self._window[:newest] if self._num_recorded < size else self._window.roll(-newest, 0)
        return self._by_expert(window)

    def logical_load(self) -> Integers:
        """The load of every expert over the window and all ranks: int64 [layers, logical], the same on every rank.

        Raises:
            DistributedError: A rank died or did not come.
        """
        load = self._by_expert(self._window.sum(0, dtype=torch.int64)[None])[0]
        if dist.is_initialized():
            with meet(self.group, "adding up the load of the experts", self.timeout):
                dist.all_reduce(load, group=self.group)
        total: Integers = load.cpu().numpy()
        return total

    def commit(self, placement: Placement, layers: list[int]) -> None:
        """Make `placement` the one in force for some layers: in place, when their weights have been moved.

        What the window holds of these layers stays what it says of their experts.
        """
        for layer in layers:
            by_expert = self._by_expert(self._window[:, layer : layer + 1], layer)[:, 0]
            first_slot = torch.from_numpy(placement.logical_to_physical[layer, :, 0]).to(by_expert.device)
            # An expert's load is the sum over its slots, so all of it may stand in its first one.
            self._window[:, layer] = 0
            self._window[:, layer].scatter_(1, first_slot.expand_as(by_expert), by_expert)
            for mine, new in (
                (self._physical_to_logical, placement.physical_to_logical),
                (self.logical_to_physical_map, placement.logical_to_physical),
                (self.logical_replica_count, placement.replica_count),
            ):
                mine[layer].copy_(torch.from_numpy(new[layer]))
            self.placement.take(placement, layer)

    def _by_expert(self, loads: Tensor, first_layer: int = 0) -> Tensor:
        """[steps, layers, physical] to [steps, layers, logical]; the layers are those from `first_layer` on."""
        experts = self._physical_to_logical[first_layer : first_layer + loads.shape[1]]
        by_expert = loads.new_zeros(*loads.shape[:2], self.layout.num_logical)
        return by_expert.scatter_add_(2, experts.expand(loads.shape[0], -1, -1), loads)
