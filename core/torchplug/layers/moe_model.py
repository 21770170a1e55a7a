"""MixtureOfExperts for a model whose experts are FusedMoE layers: its attributes follow from the layers."""

from __future__ import annotations

from torch import nn

from torchplug.errors import ContractError, Problem
from torchplug.interfaces import MixtureOfExperts
from torchplug.layers.moe import FusedMoE


class FusedMoEModel(MixtureOfExperts):
    """Base of a model class, beside torch.nn.Module: call `set_moe_attributes` at the end of its `__init__`."""

    def set_moe_attributes(self, *, num_expert_groups: int = 1, num_shared_experts: int = 0) -> None:
        """Set the ten attributes of MixtureOfExperts from the FusedMoE layers of this module, in their order in it.

        Args:
            num_expert_groups: Groups that the router chooses among.
            num_shared_experts: Experts per layer that see every token.

        Raises ContractError where the layers have different numbers of experts.
        """
        assert isinstance(self, nn.Module)
        layers = [layer for layer in self.modules() if isinstance(layer, FusedMoE)]
        placements = {layer.placement for layer in layers}
        if len(placements) > 1:
            numbers = sorted({placement.num_logical for placement in placements})
            says = f"expected MoE layers of one size, found layers of {' and '.join(map(str, numbers))} experts"
            raise ContractError(f"class {type(self).__name__!r}", Problem("moe_layers", says, "give them equally many"))
        self.expert_weights = []
        self.moe_layers = layers
        self.num_moe_layers = len(layers)
        self.num_expert_groups = num_expert_groups
        self.num_shared_experts = num_shared_experts
        first = placements.pop() if placements else None
        self.num_logical_experts = self.num_routed_experts = first.num_logical if first else 0
        self.num_physical_experts = first.num_physical if first else 0
        self.num_local_physical_experts = first.num_local if first else 0
        self.num_redundant_experts = first.num_redundant if first else 0

    def update_physical_experts_metadata(self, num_physical_experts: int, num_local_physical_experts: int) -> None:
        """Follow a change in the number of slots.

        Raises ContractError where the slots of this process would change, ParallelConfigError where the new number
        cannot be shared evenly.
        """
        if num_local_physical_experts != self.num_local_physical_experts:
            says = f"expected {self.num_local_physical_experts}, as before, found {num_local_physical_experts}"
            fix = "a process keeps its slots; let the number of processes change"
            raise ContractError("update_physical_experts_metadata", Problem("num_local_physical_experts", says, fix))
        for layer in self.moe_layers:
            assert isinstance(layer, FusedMoE)
            layer.set_num_physical_experts(num_physical_experts)
        self.num_physical_experts = num_physical_experts
        self.num_redundant_experts = num_physical_experts - self.num_logical_experts
