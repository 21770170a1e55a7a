"""The experts of a mixture-of-experts layer: gated MLPs in fused weights, of which each token uses a few.

The loop is over experts that got tokens, never over tokens: tokens are put in order by expert once, every expert
multiplies its own rows, and each token adds up its experts in the order in which it chose them. So neither the slot
that an expert lies in nor the other tokens of the batch change the order in which a token's result is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchplug.config import ParallelConfig
from torchplug.forward_context import get_forward_context
from torchplug.layers.activation import SiluAndMul, get_act_and_mul
from torchplug.layers.cpu import kernels
from torchplug.layers.cpu.kernels import Product
from torchplug.layers.placement import EplbViews, ExpertPlacement
from torchplug.layers.weights import CheckpointPart

_SPELLINGS: Sequence[Mapping[str, str]] = (
    {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    {"w1": "w1", "w2": "w2", "w3": "w3"},
)
"""What checkpoints call the projections of one expert: most models, and Mixtral."""


class FusedMoE(nn.Module):
    """`sum_j weight_j * w2[e_j] (act(w1[e_j] x) * w3[e_j] x)` over the experts e_j that each token chose.

    Args:
        num_experts: Logical experts, as a checkpoint and the router number them.
        hidden_size: Width of a token.
        intermediate_size: Width inside an expert.
        activation: Of the gate, by its name in config.json.
        bias: Whether the projections have biases.
        parallel_config: Says how many redundant experts there are and whether ranks share the experts; None for one
            slot for each expert, here.
        prefix: The layer's name in the model.

    Weights are those of the slots of this rank, one row for each, so that an expert can be moved by copying its rows:
    `w13_weight` [slots, 2 * intermediate_size, hidden_size], the gate over the up projection, and `w2_weight` [slots,
    hidden_size, intermediate_size]; with biases `w13_bias` and `w2_bias`, the same without the last dimension.
    Checkpoints may hold one tensor per projection of an expert (`experts.3.gate_proj.weight`, or `experts.3.w1.weight`)
    or one for all experts (`experts.gate_up_proj`, `experts.down_proj`, and `..._bias`): `load_weights` takes both, and
    fills every slot that holds the expert.

    Where ranks share the experts, `forward` gives the sum over the experts of this rank.

    Raises ParallelConfigError where the ranks cannot share the slots evenly.
    """

    w13_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        bias: bool = False,
        parallel_config: ParallelConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.placement = (
            ExpertPlacement(num_experts)
            if parallel_config is None
            else ExpertPlacement.of(num_experts, parallel_config)
        )
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.act_fn = get_act_and_mul(activation)
        self.prefix = prefix
        slots = self.placement.num_local

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(slots, *shape), requires_grad=False)

        self.w13_weight = parameter(2 * intermediate_size, hidden_size)
        self.w2_weight = parameter(hidden_size, intermediate_size)
        self.w13_bias = parameter(2 * intermediate_size) if bias else None
        self.w2_bias = parameter(hidden_size) if bias else None
        self._gate_up_product: Product = F.linear
        self._down_product: Product = F.linear
        self._native: kernels.Experts | None = None
        self._eplb: EplbViews | None = None

    def forward(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The experts' result for every token.

        Args:
            hidden_states: [num_tokens, hidden_size].
            topk_weights: float32 [num_tokens, top_k], as `TopKRouter.route` gives them.
            topk_ids: int64 [num_tokens, top_k], different logical experts of each token.
            shared: What all tokens go through besides, from [num_tokens, hidden_size] to the same shape; its result is
                added.

        Returns [num_tokens, hidden_size] in the dtype of `hidden_states`.
        """
        slots = topk_ids if self._eplb is None else self._balanced(self._eplb, topk_ids)
        if self.placement.first_local:
            slots = slots - self.placement.first_local
        routed = None
        if self._native is not None:
            own = self._parameters
            routed = self._native(
                hidden_states,
                self.w13_weight,
                own.get("w13_bias"),
                self.w2_weight,
                own.get("w2_bias"),
                slots,
                topk_weights,
            )
        if routed is None:
            routed = self._by_expert(hidden_states, topk_weights, slots)
        return routed if shared is None else routed + shared(hidden_states)

    def _balanced(self, eplb: EplbViews, topk_ids: Tensor) -> Tensor:
        slots = eplb.choose(topk_ids)
        context = get_forward_context()
        if context is None:
            eplb.record(slots)
        elif context.record_expert_load:
            eplb.record(slots[: slots.shape[0] - context.num_padding_tokens])
        return slots

    def _by_expert(self, hidden_states: Tensor, topk_weights: Tensor, slots: Tensor) -> Tensor:
        num_tokens, top_k = slots.shape
        num_local = self.placement.num_local
        whole = self.placement.ep_size == 1 and self._eplb is None
        if not whole:
            # Picks of other ranks' slots, and of experts that do not exist, come last and are left out.
            slots = torch.where((slots >= 0) & (slots < num_local), slots, num_local)
        flat = slots.flatten()
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=num_local).tolist()[:num_local]
        used = order if whole else order[: sum(counts)]
        gathered = hidden_states.index_select(0, used.div(top_k, rounding_mode="floor"))
        results, start = [], 0
        for slot, count in enumerate(counts):
            if count:
                results.append(self._expert(gathered.narrow(0, start, count), slot))
                start += count
        make = hidden_states.new_empty if whole else hidden_states.new_zeros
        rows = make(num_tokens * top_k, self.hidden_size)
        if results:
            rows.index_copy_(0, used, torch.cat(results))
        rows = rows.view(num_tokens, top_k, self.hidden_size)
        # In float32, in the order of the token's choices.
        return (rows * topk_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)

    def _expert(self, rows: Tensor, slot: int) -> Tensor:
        """[n, hidden_size] -> [n, hidden_size] through the expert in a slot of this rank."""
        bias = None if self.w13_bias is None else self.w13_bias[slot]
        inner = self.act_fn(self._gate_up_product(rows, self.w13_weight[slot], bias))
        bias = None if self.w2_bias is None else self.w2_bias[slot]
        return self._down_product(inner, self.w2_weight[slot], bias)

    def process_weights_after_loading(self) -> None:
        """Choose how to multiply here; called once by the loader. The weights stay plain rows, which can be moved."""
        if isinstance(self.act_fn, SiluAndMul):
            self._native = kernels.experts(self.w13_weight, self.w2_weight)
        self._gate_up_product = kernels.linear(self.w13_weight[0]) or F.linear
        self._down_product = kernels.linear(self.w2_weight[0]) or F.linear

    # -- weights and the load balancer ----------------------------------------------------------------------------

    def checkpoint_spellings(self) -> tuple[Mapping[str, CheckpointPart], ...]:
        """How checkpoints name one expert's projections, for `load_weights`."""
        hidden, inner = self.hidden_size, self.intermediate_size
        spellings = []
        for names in _SPELLINGS:
            parts: dict[str, CheckpointPart] = {}
            projections: tuple[tuple[str, str, tuple[int, ...]], ...] = (
                ("w1", "w13", (inner, hidden)),
                ("w3", "w13", (inner, hidden)),
                ("w2", "w2", (hidden, inner)),
            )
            for expert in range(self.num_experts):
                for projection, own, shape in projections:
                    name, shard = f"{expert}.{names[projection]}", (expert, projection)
                    parts[f"{name}.weight"] = CheckpointPart(f"{own}_weight", shard, shape)
                    if self.w13_bias is not None:
                        parts[f"{name}.bias"] = CheckpointPart(f"{own}_bias", shard, shape[:1])
            spellings.append(parts)
        fused = {
            "gate_up_proj": CheckpointPart("w13_weight", None, (self.num_experts, 2 * inner, hidden)),
            "down_proj": CheckpointPart("w2_weight", None, (self.num_experts, hidden, inner)),
        }
        if self.w13_bias is not None:
            fused |= {
                "gate_up_proj_bias": CheckpointPart("w13_bias", None, (self.num_experts, 2 * inner)),
                "down_proj_bias": CheckpointPart("w2_bias", None, (self.num_experts, hidden)),
            }
        return (*spellings, fused)

    def weight_loader(self, param: Tensor, tensor: Tensor, shard_id: tuple[int, str] | None = None) -> None:
        """Fill every slot of `param` that holds one expert, with one of its projections.

        Args:
            param: One of this layer's parameters.
            tensor: The projection's weight or bias; without `shard_id` the fused one of all experts.
            shard_id: The logical expert, and "w1" (gate), "w3" (up) or "w2" (down).

        Raises ValueError where the shape does not fit; `load_weights` reports it with the tensor's name.
        """
        if shard_id is None:
            expected = (self.num_experts, *param.shape[1:])
            if tensor.shape != expected:
                raise ValueError(f"expected shape {list(expected)}, found {list(tensor.shape)}")
            first = self.placement.first_local
            for slot, expert in enumerate(self.placement.initial_experts[first : first + self.placement.num_local]):
                param[slot].copy_(tensor[expert])
            return
        expert, projection = shard_id
        start, rows = {"w1": (0, self.intermediate_size), "w3": (self.intermediate_size, self.intermediate_size)}.get(
            projection, (0, self.hidden_size)
        )
        expected = (rows, *param.shape[2:])
        if tensor.shape != expected:
            raise ValueError(f"expected shape {list(expected)}, found {list(tensor.shape)}")
        for slot in self.placement.local_slots(expert):
            param[slot].narrow(0, start, rows).copy_(tensor)

    def get_expert_weights(self) -> list[Tensor]:
        """Every tensor of which a slot of this rank owns one row along dimension 0: what moves when an expert moves."""
        tensors = (self.w13_weight, self.w2_weight, self.w13_bias, self.w2_bias)
        return [tensor for tensor in tensors if tensor is not None]

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: Tensor,
        logical_to_physical_map: Tensor,
        logical_replica_count: Tensor,
    ) -> None:
        """From now on ask the balancer's maps which slot serves a token, and count the tokens of every slot.

        The tensors are kept as views on the model's device; they must stay the same for life.

        Args:
            moe_layer_idx: This layer's row in the tensors.
            expert_load_view: int32 [layers, physical or more].
            logical_to_physical_map: int64 [layers, logical, most replicas], -1 where unused.
            logical_replica_count: int64 [layers, logical].

        Raises ContractError naming the tensor of another dtype or shape.
        """
        self._eplb = EplbViews.of(
            self.placement,
            moe_layer_idx,
            expert_load_view,
            logical_to_physical_map,
            logical_replica_count,
            where=self.prefix or "FusedMoE",
        )

    def set_num_physical_experts(self, num_physical: int) -> None:
        """Follow ranks that joined or left: so many slots over all ranks, as many on each as before.

        Raises ParallelConfigError where this does not go.
        """
        self.placement = self.placement.resized(num_physical)

    def extra_repr(self) -> str:
        placement = self.placement
        slots = "" if placement.num_local == self.num_experts else f", {placement.num_local} slots here"
        return f"num_experts={self.num_experts}{slots}, {self.hidden_size} -> {self.intermediate_size}"
