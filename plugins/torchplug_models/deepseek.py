"""DeepSeek-V2 and V3: multi-head latent attention, and experts that a token chooses by groups.

Source: DeepSeek-AI, DeepSeek-V2, 2024, sections 2.1 (latent attention) and 2.2 (experts); DeepSeek-V3 Technical
Report, 2024, section 2.1; config and weight names as in transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM,
before and since its version 5.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchplug import VllmConfig
from torchplug.layers import (
    Attention,
    ColumnParallelLinear,
    FusedMoE,
    FusedMoEModel,
    GroupScore,
    RMSNorm,
    RotaryEmbedding,
    Rotation,
    RowParallelLinear,
    TopKRouter,
    apply_rotary,
    load_weights,
    rope_from_config,
    softmax_scaling,
)

from torchplug_models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP


class LatentAttention(nn.Module):
    """Multi-head latent attention in its expanded form: the cache holds every head's keys and values.

    Queries and keys have a part without position, expanded from a latent, and a rotated part, which the keys of all
    heads share. Values have a size of their own; all three are padded to the larger one for the cache.
    """

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self.num_heads = heads
        self.nope_size, self.rope_size = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.key_size, self.value_size = self.nope_size + self.rope_size, config.v_head_dim
        self.head_size = max(self.key_size, self.value_size)
        self.latent_size = config.kv_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, heads * self.key_size)
        else:
            self.q_a_proj = ColumnParallelLinear(hidden, config.q_lora_rank, bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank)
            self.q_b_proj = ColumnParallelLinear(config.q_lora_rank, heads * self.key_size)
        self.has_q_latent = config.q_lora_rank is not None
        self.kv_a_proj_with_mqa = ColumnParallelLinear(hidden, self.latent_size + self.rope_size, bias)
        self.kv_a_layernorm = RMSNorm(self.latent_size)
        self.kv_b_proj = ColumnParallelLinear(self.latent_size, heads * (self.nope_size + self.value_size))
        self.attn = Attention(
            heads, self.head_size, self.key_size**-0.5 * softmax_scaling(config), prefix=f"{prefix}.attn"
        )
        self.o_proj = RowParallelLinear(heads * self.value_size, hidden, bias)

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        num_tokens, heads = hidden_states.shape[0], self.num_heads
        if self.has_q_latent:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        else:
            query = self.q_proj(hidden_states)
        q_nope, q_rope = query.view(num_tokens, heads, -1).split((self.nope_size, self.rope_size), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split((self.latent_size, self.rope_size), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).view(num_tokens, heads, -1)
        k_nope, value = expanded.split((self.nope_size, self.value_size), dim=-1)
        turned = apply_rotary(torch.cat((q_rope.flatten(1), k_rope), dim=-1), rotation, self.rope_size)
        q_rope, k_rope = turned.view(num_tokens, heads + 1, -1).split((heads, 1), dim=1)
        query = torch.cat((q_nope, q_rope), dim=-1)
        key = torch.cat((k_nope, k_rope.expand(-1, heads, -1)), dim=-1)
        query, key, value = (
            F.pad(part, (0, self.head_size - part.shape[-1])).flatten(1) for part in (query, key, value)
        )
        out = self.attn(query, key, value).view(num_tokens, heads, -1)[..., : self.value_size]
        return self.o_proj(out.flatten(1))


class DeepseekMoE(nn.Module):
    def __init__(self, vllm_config: VllmConfig, router: TopKRouter, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        inner = config.moe_intermediate_size
        self.gate = router
        self.experts = FusedMoE(
            config.n_routed_experts,
            config.hidden_size,
            inner,
            activation=config.hidden_act,
            parallel_config=vllm_config.parallel_config,
            prefix=f"{prefix}.experts",
        )
        shared = config.n_shared_experts
        self.shared_experts = LlamaMLP(config, bias=False, intermediate_size=inner * shared) if shared else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.experts(hidden_states, *self.gate.route(hidden_states), self.shared_experts)


class DeepseekV2ForCausalLM(LlamaForCausalLM, FusedMoEModel):
    """DeepSeek-V2 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"gate_up_proj": ["gate_proj", "up_proj"]}
    config_defaults: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 1407,
        "tie_word_embeddings": False,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        self.num_hidden_layers = config.num_hidden_layers
        self.num_extra_layers = config.get("num_nextn_predict_layers") or 0
        self.set_moe_attributes(num_expert_groups=config.n_group or 1, num_shared_experts=config.n_shared_experts or 0)

    @staticmethod
    def rotary_embedding(config: Any) -> RotaryEmbedding:
        return rope_from_config(config, config.qk_rope_head_dim, config.max_position_embeddings, interleaved=True)

    @staticmethod
    def router(config: Any, prefix: str) -> TopKRouter:
        """Softmax over all experts; with "group_limited_greedy" a token first chooses groups by their best expert."""
        grouped = config.topk_method == "group_limited_greedy"
        return TopKRouter(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            renormalize=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            num_expert_group=config.n_group if grouped else 1,
            topk_group=config.topk_group if grouped else 1,
            float32_logits=True,
            prefix=prefix,
        )

    @classmethod
    def decoder_layer(cls, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        if index >= config.first_k_dense_replace and index % config.moe_layer_freq == 0:
            mlp: nn.Module = DeepseekMoE(vllm_config, cls.router(config, f"{prefix}.mlp.gate"), f"{prefix}.mlp")
        else:
            mlp = LlamaMLP(config, bias=config.mlp_bias)
        return LlamaDecoderLayer(config, LatentAttention(config, f"{prefix}.self_attn"), mlp)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Layers past the stack predict further tokens (DeepSeek-V3, section 2.2) and are left out."""
        first = self.num_hidden_layers
        extra = [f"model.layers.{index}.*" for index in range(first, first + self.num_extra_layers)]
        return load_weights(self, weights, skip=extra, packed=self.packed_modules_mapping)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with a dense layer below one of experts in groups, and values smaller than keys."""
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "moe_intermediate_size": 24,
        }


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3 with its language-model head."""

    config_defaults: ClassVar[dict[str, Any]] = DeepseekV2ForCausalLM.config_defaults | {
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
        "rope_interleave": True,
    }

    @staticmethod
    def rotary_embedding(config: Any) -> RotaryEmbedding:
        return rope_from_config(
            config,
            config.qk_rope_head_dim,
            config.max_position_embeddings,
            interleaved=config.rope_interleave,
        )

    @staticmethod
    def router(config: Any, prefix: str) -> TopKRouter:
        """Sigmoid scores, and a bias that only the choice of groups, by their best two experts, and experts sees."""
        return TopKRouter(
            config.hidden_size,
            config.n_routed_experts,
            config.num_experts_per_tok,
            scoring_func="sigmoid",
            renormalize=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            num_expert_group=config.n_group or 1,
            topk_group=config.topk_group or 1,
            group_score=GroupScore.TOP2_SUM,
            correction_bias=True,
            float32_logits=True,
            prefix=prefix,
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with a dense layer below one of experts in groups, and values smaller than keys."""
        config = super().tiny_config()
        del config["topk_method"]
        return config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
