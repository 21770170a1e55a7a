"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows in the upper layers where asked for.

Source: Yang et al., Qwen2 Technical Report, 2024, section 2.2.1; Bai et al., Qwen Technical Report, 2023, section 2.3
(biases); config and weight names as in transformers' Qwen2ForCausalLM.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torchplug import VllmConfig
from torchplug.layers import layer_window

from torchplug_models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 with its language-model head."""

    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 32,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
        "tie_word_embeddings": False,
    }

    @staticmethod
    def decoder_layer(vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        attention = LlamaAttention(
            config,
            f"{prefix}.self_attn",
            qkv_bias=True,
            output_bias=False,
            sliding_window=qwen_window(config, index),
        )
        return LlamaDecoderLayer(config, attention, LlamaMLP(config, bias=False))

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with one layer that sees everything and one with a window."""
        return super().tiny_config() | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
        }


def qwen_window(config: Any, index: int) -> int | None:
    """The window of layer `index`. Despite its name, `max_window_layers` counts the layers, from the bottom, that have
    none."""
    window = config.sliding_window if config.use_sliding_window else None
    return layer_window(config, index, window, slides=index >= config.max_window_layers)
