"""The one stop that the tour's own class cannot make: a model without any attention, which IsHybrid excludes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torchplug import VllmConfig, hookimpl
from torchplug.interfaces import HasInnerState, IsAttentionFree
from torchplug.layers import load_weights

from torchplug_tour.decoder import DecayedSum


class TourRecurrentForCausalLM(nn.Module, HasInnerState, IsAttentionFree):
    """Embeddings, one decayed sum, a head."""

    config_defaults: ClassVar[dict[str, Any]] = {"decay": 0.5, "max_position_embeddings": 64}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mixer = DecayedSum(config.decay)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @hookimpl
    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """One row, the decayed sum so far: [hidden / tensor_parallel_size]."""
        return ((vllm_config.model_config.hf_config.hidden_size // vllm_config.parallel_config.tensor_parallel_size,),)

    @hookimpl
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden_states = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return hidden_states + self.mixer(hidden_states, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(self, weights)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink."""
        return {
            "architectures": ["TourRecurrentForCausalLM"],
            "model_type": "tour",
            "vocab_size": 32,
            "hidden_size": 8,
        }
