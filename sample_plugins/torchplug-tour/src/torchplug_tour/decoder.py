"""The language model inside the tour: three kinds of layers whose results can be worked out on paper.

Every layer adds to the stream what it reads from it. Nothing is kept between steps, so torchplug calls the model with
the whole prefix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchplug.layers import ExpertPlacement


class CausalMean(nn.Module):
    """Attention whose scores are all equal: each token reads the mean of itself and of all before it."""

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        seen = torch.arange(1, hidden_states.shape[0] + 1, device=hidden_states.device).unsqueeze(1)
        return hidden_states.cumsum(0) / seen


class DecayedSum(nn.Module):
    """Recurrence: the state of a token is its own row plus the state before it, times `decay` per position between."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        time = positions if positions.dim() == 1 else positions[0]
        age = (time.unsqueeze(1) - time).to(hidden_states.dtype)
        index = torch.arange(len(time), device=time.device)
        causal = index.unsqueeze(1) >= index
        return torch.where(causal, self.decay**age, 0.0) @ hidden_states


class Experts(nn.Module):
    """Each token is multiplied by the row of one expert, the one for which its gate is largest.

    Logical experts are the checkpoint's. Physical experts are rows of `weight`, one per slot of this process; without
    a balancer slot i serves expert i and the redundant slots idle. A token whose expert is in another process gives 0
    here.

    Args:
        hidden_size: Width of a token.
        placement: How many slots there are, and which of them are here.
    """

    def __init__(self, hidden_size: int, placement: ExpertPlacement) -> None:
        super().__init__()
        self.num_experts = placement.num_logical
        self.first = placement.first_local
        self.held = placement.initial_experts[self.first : self.first + placement.num_local]
        self.gate = nn.Linear(hidden_size, self.num_experts, bias=False)
        self.weight = nn.Parameter(torch.empty(placement.num_local, hidden_size))
        self.views: tuple[Tensor, Tensor, Tensor] | None = None

    def weight_loader(self, parameter: nn.Parameter, experts: Tensor) -> None:
        """The checkpoint has a row per logical expert; slot i starts with expert i modulo their number."""
        if experts.shape != (self.num_experts, parameter.shape[1]):
            raise ValueError(f"expected {[self.num_experts, parameter.shape[1]]}, found {list(experts.shape)}")
        parameter.copy_(experts[list(self.held)])

    def get_expert_weights(self) -> list[Tensor]:
        return [self.weight]

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: Tensor,
        logical_to_physical_map: Tensor,
        logical_replica_count: Tensor,
    ) -> None:
        """Keep this layer's part of the balancer's tensors. They are views: the balancer goes on writing into them."""
        self.views = (
            expert_load_view[moe_layer_idx],
            logical_to_physical_map[moe_layer_idx],
            logical_replica_count[moe_layer_idx],
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        slots = self.gate(hidden_states).argmax(-1)
        if self.views is not None:
            load, slots_of, replicas = self.views
            turn = torch.arange(len(slots), device=slots.device) % replicas[slots]
            slots = slots_of[slots, turn]
            load.index_add_(0, slots, torch.ones_like(slots, dtype=load.dtype))
        slots = slots - self.first
        here = (slots >= 0) & (slots < len(self.weight))
        return hidden_states * self.weight[slots.where(here, 0)] * here.unsqueeze(-1)


class TourLayer(nn.Module):
    """A mixer ("attention" or "mamba"), then experts; a layer of kind "none" does nothing at all."""

    def __init__(self, config: Any, kind: str, placement: ExpertPlacement) -> None:
        super().__init__()
        if kind not in ("attention", "mamba", "none"):
            raise ValueError(f"config.json: layers_block_type holds {kind!r}, expected attention, mamba or none")
        self.mixer = {"attention": CausalMean, "mamba": lambda: DecayedSum(config.decay), "none": lambda: None}[kind]()
        self.experts = None if kind == "none" else Experts(config.hidden_size, placement)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        if self.mixer is None or self.experts is None:
            return hidden_states
        hidden_states = hidden_states + self.mixer(hidden_states, positions)
        return hidden_states + self.experts(hidden_states)


class TourDecoder(nn.Module):
    """Token embeddings and the layers."""

    def __init__(self, config: Any, placement: ExpertPlacement) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TourLayer(config, kind, placement) for kind in config.layers_block_type)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self, hidden_states: Tensor, positions: Tensor, wanted: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The stream after the last layer, and what the layers `wanted` read. hidden_states: [n, hidden]."""
        read = []
        for index, layer in enumerate(self.layers):
            if index in wanted:
                read.append(hidden_states)
            hidden_states = layer(hidden_states, positions)
        return hidden_states, read
