"""LFM2: layers with a gated short convolution, and a few with grouped-query attention whose heads are normalised.

Source: Liquid AI, LFM2 Technical Report, 2025, section 2; config and weight names as in transformers'
Lfm2ForCausalLM, and the keys of the published files that it maps to its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torchplug import VllmConfig
from torchplug.interfaces import MambaStateCopyFunc
from torchplug.layers import (
    RotaryEmbedding,
    ShortConv,
    StateSettings,
    get_conv_copy_spec,
    rope_from_config,
    short_conv_state_shapes,
)

from torchplug_models.hybrid import HybridDecoderLayer, HybridForCausalLM, listed_as_attention
from torchplug_models.llama import LlamaMLP, head_size_of
from torchplug_models.qwen3 import Qwen3Attention


class Lfm2ForCausalLM(HybridForCausalLM):
    """LFM2 with its language-model head."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "model.embedding_norm": "model.norm",
        "operator_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "self_attn.out_proj": "mixer.o_proj",
        "self_attn.q_layernorm": "mixer.q_norm",
        "self_attn.k_layernorm": "mixer.k_norm",
        "self_attn": "mixer",
        "conv.conv": "mixer.conv",
        "conv.in_proj": "mixer.in_proj",
        "conv.out_proj": "mixer.out_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
    }
    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "norm_eps": 1e-5,
        "max_position_embeddings": 128_000,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": None,
        "tie_word_embeddings": True,
    }

    @staticmethod
    def rotary_embedding(config: Any) -> RotaryEmbedding:
        return rope_from_config(config, head_size_of(config), config.max_position_embeddings, theta=1_000_000.0)

    @staticmethod
    def norm_eps(config: Any) -> float:
        return config.norm_eps

    @staticmethod
    def decoder_layer(vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        mixer: nn.Module
        if is_attention(config, index):
            mixer = Qwen3Attention(config, f"{prefix}.mixer", bias=False, norm_eps=config.norm_eps)
        else:
            settings = StateSettings.of(vllm_config)
            mixer = ShortConv(config.hidden_size, config.conv_L_cache, settings=settings, bias=config.conv_bias)
        mlp = LlamaMLP(config, bias=False, intermediate_size=intermediate_size_of(config))
        return HybridDecoderLayer(config, mixer, mlp, norm_eps=config.norm_eps)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Of the convolution alone: [conv_L_cache - 1 + num_spec, hidden / tp]."""
        config = vllm_config.model_config.hf_config
        return short_conv_state_shapes(
            StateSettings.of(vllm_config), hidden_size=config.hidden_size, conv_kernel=config.conv_L_cache
        )

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (StateSettings.of(vllm_config).conv_dtype,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        return (get_conv_copy_spec,)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with attention between two convolutions."""
        return {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "vocab_size": 128,
            "hidden_size": 48,
            "intermediate_size": 60,
            "block_multiple_of": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "conv_L_cache": 3,
            "layer_types": ["conv", "full_attention", "conv"],
        }


def is_attention(config: Any, index: int) -> bool:
    """What `layer_types` says; in the first published files `full_attn_idxs`, and without either every layer is."""
    if config.get("layer_types") is not None:
        return listed_as_attention(config, "layer_types", index, recurrent=("conv",))
    return config.full_attn_idxs is None or index in config.full_attn_idxs


def intermediate_size_of(config: Any) -> int:
    """Width of the MLPs: that of the config, or of a gated MLP with as many weights as a plain one of that width has,
    made a multiple of `block_multiple_of`."""
    width = config.get("block_ff_dim") or config.intermediate_size
    if not config.block_auto_adjust_ff_dim:
        return width
    width, multiple = int(config.block_ffn_dim_multiplier * int(2 * width / 3)), config.block_multiple_of
    return multiple * -(-width // multiple)
