"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 whose MLPs are small experts beside a shared one that a gate weighs.

Source: Qwen Team, Qwen1.5-MoE, 2024; Yang et al., Qwen2 Technical Report, 2024, section 2.2.2; config and weight names
as in transformers' Qwen2MoeForCausalLM, before and since its version 5.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchplug import VllmConfig
from torchplug.layers import ColumnParallelLinear, FusedMoE, FusedMoEModel, TopKRouter, layer_window

from torchplug_models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP


class QwenMoE(nn.Module):
    """Softmax routing whose weights need not add up to 1; the layer of Qwen3 too, which has no shared expert."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        num_experts = num_experts_of(config)
        self.gate = TopKRouter(
            config.hidden_size,
            num_experts,
            config.num_experts_per_tok,
            renormalize=config.norm_topk_prob,
            prefix=f"{prefix}.gate",
        )
        self.experts = FusedMoE(
            num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
            activation=config.hidden_act,
            parallel_config=vllm_config.parallel_config,
            prefix=f"{prefix}.experts",
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.experts(hidden_states, *self.gate.route(hidden_states))


class Qwen2MoE(QwenMoE):
    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config, prefix)
        config = vllm_config.model_config.hf_config
        self.shared_expert = LlamaMLP(config, bias=False, intermediate_size=config.shared_expert_intermediate_size)
        self.shared_expert_gate = ColumnParallelLinear(config.hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.experts(hidden_states, *self.gate.route(hidden_states), self.shared)

    def shared(self, hidden_states: Tensor) -> Tensor:
        return torch.sigmoid(self.shared_expert_gate(hidden_states)) * self.shared_expert(hidden_states)


class Qwen2MoeForCausalLM(LlamaForCausalLM, FusedMoEModel):
    """Qwen2-MoE with its language-model head."""

    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 16,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.set_moe_attributes(num_shared_experts=1)

    @staticmethod
    def decoder_layer(vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        attention = LlamaAttention(
            config,
            f"{prefix}.self_attn",
            qkv_bias=config.qkv_bias,
            output_bias=False,
            # Unlike in Qwen2, `max_window_layers` counts the layers, from the bottom, of which every second slides.
            sliding_window=layer_window(
                config,
                index,
                config.sliding_window if config.use_sliding_window else None,
                slides=index % 2 == 0 and index < config.max_window_layers,
            ),
        )
        mlp = Qwen2MoE(vllm_config, f"{prefix}.mlp") if is_sparse(config, index) else LlamaMLP(config, bias=False)
        return LlamaDecoderLayer(config, attention, mlp)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with a layer of experts and a window, and a layer without either."""
        return super().tiny_config() | {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "num_experts_per_tok": 2,
            "num_experts": 6,
        }


def is_sparse(config: Any, index: int) -> bool:
    """Whether layer `index` has experts: every `decoder_sparse_step`-th, but for those in `mlp_only_layers`."""
    if index in (config.mlp_only_layers or ()):
        return False
    return num_experts_of(config) > 0 and (index + 1) % config.decoder_sparse_step == 0


def num_experts_of(config: Any) -> int:
    """Experts of a layer; transformers 5 writes Qwen3's under another name than the model's authors."""
    return config.get("num_local_experts") or config.num_experts
