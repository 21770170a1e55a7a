"""Mixtral: Mistral whose MLPs are mixtures of experts, of which each token uses two.

Source: Jiang et al., Mixtral of Experts, 2024, section 2.1; config and weight names as in transformers'
MixtralForCausalLM, before and since its version 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor, nn
from torchplug import VllmConfig
from torchplug.layers import FusedMoE, FusedMoEModel, TopKRouter, layer_window, load_weights

from torchplug_models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM


class MixtralMoE(nn.Module):
    """The weights of a token's experts are the softmax over all experts, made to add up to 1."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        num_experts = config.num_local_experts
        self.gate = TopKRouter(config.hidden_size, num_experts, config.num_experts_per_tok, prefix=f"{prefix}.gate")
        self.experts = FusedMoE(
            num_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            parallel_config=vllm_config.parallel_config,
            prefix=f"{prefix}.experts",
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.experts(hidden_states, *self.gate.route(hidden_states))


class MixtralForCausalLM(LlamaForCausalLM, FusedMoEModel):
    """Mixtral with its language-model head."""

    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.set_moe_attributes()

    @staticmethod
    def decoder_layer(vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        attention = LlamaAttention(
            config,
            f"{prefix}.self_attn",
            qkv_bias=False,
            output_bias=False,
            sliding_window=layer_window(config, index, config.sliding_window),
        )
        return LlamaDecoderLayer(config, attention, MixtralMoE(vllm_config, f"{prefix}.mlp"))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(self, weights, rename={"block_sparse_moe": "mlp"}, packed=self.packed_modules_mapping)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config whose window is shorter than a test's prompt."""
        return super().tiny_config() | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "intermediate_size": 48,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        }
