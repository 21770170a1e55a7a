"""Qwen3, the mixture-of-experts models: Qwen3's attention with the experts of Qwen2-MoE, without a shared one.

Source: Yang et al., Qwen3 Technical Report, 2025, section 2; config and weight names as in transformers'
Qwen3MoeForCausalLM, before and since its version 5.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torchplug import VllmConfig
from torchplug.layers import FusedMoEModel, layer_window

from torchplug_models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from torchplug_models.qwen2_moe import QwenMoE, is_sparse
from torchplug_models.qwen3 import Qwen3Attention


class Qwen3MoeForCausalLM(LlamaForCausalLM, FusedMoEModel):
    """Qwen3-MoE with its language-model head."""

    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.set_moe_attributes()

    @staticmethod
    def decoder_layer(vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        window = config.sliding_window if config.use_sliding_window else None
        attention = Qwen3Attention(
            config,
            f"{prefix}.self_attn",
            bias=config.attention_bias,
            norm_eps=config.rms_norm_eps,
            sliding_window=layer_window(config, index, window),
        )
        mlp = QwenMoE(vllm_config, f"{prefix}.mlp") if is_sparse(config, index) else LlamaMLP(config, bias=False)
        return LlamaDecoderLayer(config, attention, mlp)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with a layer of experts and one without, both with a window."""
        return super().tiny_config() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "use_sliding_window": True,
            "sliding_window": 6,
            "mlp_only_layers": [0],
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 3,
            "num_experts": 6,
            "norm_topk_prob": True,
        }
