"""Granite 4: Mamba-2 and attention layers, each with experts beside an MLP that sees every token, and with multipliers
on the embeddings, the scores, what layers add to the stream, and the logits.

Source: IBM, Granite 4.0, 2025; the multipliers are those of Granite 3.0 Language Models, 2024, section 2; config and
weight names as in transformers' GraniteMoeHybridForCausalLM, before and since its version 5.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn
from torchplug import VllmConfig
from torchplug.layers import FusedMoE, FusedMoEModel, RotaryEmbedding, TopKRouter

from torchplug_models.hybrid import HybridDecoderLayer, Mamba2HybridForCausalLM, listed_as_attention
from torchplug_models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP


class GraniteMLP(nn.Module):
    """An MLP that all tokens go through, and with any `num_local_experts` experts beside it, whose weights are the
    softmax over the logits of those that a token chose."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        num_experts = config.num_local_experts
        self.shared_mlp = LlamaMLP(config, bias=False, intermediate_size=config.shared_intermediate_size)
        self.experts: FusedMoE | None = None
        if num_experts > 0:
            self.router = TopKRouter(
                config.hidden_size, num_experts, config.num_experts_per_tok, prefix=f"{prefix}.router"
            )
            self.experts = FusedMoE(
                num_experts,
                config.hidden_size,
                config.intermediate_size,
                activation=config.hidden_act,
                parallel_config=vllm_config.parallel_config,
                prefix=f"{prefix}.experts",
            )

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.experts is None:
            return self.shared_mlp(hidden_states)
        return self.experts(hidden_states, *self.router.route(hidden_states), self.shared_mlp)


class GraniteMoeHybridForCausalLM(Mamba2HybridForCausalLM, FusedMoEModel):
    """Granite 4 with its language-model head."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "self_attn": "mixer",
        "mamba": "mixer",
        # What files call the experts, and transformers 5 writes again.
        "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
        "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
        "block_sparse_moe.router.layer": "block_sparse_moe.router",
        "block_sparse_moe": "mlp",
        "shared_mlp.input_linear": "mlp.shared_mlp.gate_up_proj",
        "shared_mlp.output_linear": "mlp.shared_mlp.down_proj",
    }
    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "position_embedding_type": None,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_d_head": "auto",
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "time_step_limit": (0.0, math.inf),
        "tie_word_embeddings": False,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.embedding_multiplier = config.embedding_multiplier
        self.logits_scaling = config.logits_scaling
        self.set_moe_attributes(num_shared_experts=int(config.num_local_experts > 0))

    @staticmethod
    def rotary_embedding(config: Any) -> RotaryEmbedding | None:
        return LlamaForCausalLM.rotary_embedding(config) if config.position_embedding_type == "rope" else None

    @classmethod
    def decoder_layer(cls, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        mixer: nn.Module
        if is_attention(config, index):
            bias = config.attention_bias
            scale = config.attention_multiplier
            mixer = LlamaAttention(config, f"{prefix}.mixer", qkv_bias=bias, output_bias=bias, scale=scale)
        else:
            mixer = cls.mamba2_mixer(vllm_config)
        return HybridDecoderLayer(
            config,
            mixer,
            GraniteMLP(vllm_config, f"{prefix}.mlp"),
            norm_eps=config.rms_norm_eps,
            residual_multiplier=config.residual_multiplier,
        )

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        hidden_states = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(hidden_states * self.embedding_multiplier, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states) / self.logits_scaling

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with attention between two recurrent layers, and no multiplier of 1."""
        return {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "layer_types": ["mamba", "attention", "mamba"],
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.25,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.25,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 4,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
        }


def is_attention(config: Any, index: int) -> bool:
    """What `layers_block_type` says, or `layer_types`; without either no layer has attention."""
    for key in ("layers_block_type", "layer_types"):
        if config.get(key) is not None:
            return listed_as_attention(config, key, index, recurrent=("linear_attention", "mamba"))
    return False
