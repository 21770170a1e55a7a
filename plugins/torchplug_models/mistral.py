"""Mistral: Llama without biases, where a token sees only a window of the past.

Source: Jiang et al., Mistral 7B, 2023, section 2 (sliding window attention); config and weight names as in
transformers' MistralForCausalLM. Later releases have no window (`sliding_window` null) and heads that do not make up
the hidden size (`head_dim`).
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torchplug import VllmConfig
from torchplug.layers import layer_window

from torchplug_models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral with its language-model head.

    Every layer slides, unless the config has `layer_types`: those are followed (as transformers does in its Ministral
    class; its Mistral class warns and lets all layers slide).
    """

    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    }

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
        return LlamaDecoderLayer(config, attention, LlamaMLP(config, bias=False))

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config whose window is shorter than a test's prompt."""
        return super().tiny_config() | {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": 6,
        }
