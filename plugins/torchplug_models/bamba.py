"""Bamba: Mamba-2 layers and a few with attention that rotates half of each head, every one with a gated MLP.

Source: IBM, Princeton, CMU and UIUC, Bamba: Inference-Efficient Hybrid Mamba2 Model, 2024; config and weight names as
in transformers' BambaForCausalLM.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import nn
from torchplug import VllmConfig

from torchplug_models.hybrid import HybridDecoderLayer, Mamba2HybridForCausalLM
from torchplug_models.llama import LlamaAttention, LlamaMLP


class BambaForCausalLM(Mamba2HybridForCausalLM):
    """Bamba with its language-model head."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "model.final_layernorm": "model.norm",
        "self_attn": "mixer",
        "mamba": "mixer",
        "pre_ff_layernorm": "post_attention_layernorm",
        "feed_forward": "mlp",
    }
    config_defaults: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262_144,
        "partial_rotary_factor": 0.5,
        "attn_layer_indices": None,
        "attention_bias": False,
        "mlp_bias": False,
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

    @classmethod
    def decoder_layer(cls, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        mixer: nn.Module
        if index in (config.attn_layer_indices or ()):
            bias = config.attention_bias
            mixer = LlamaAttention(config, f"{prefix}.mixer", qkv_bias=bias, output_bias=bias)
        else:
            mixer = cls.mamba2_mixer(vllm_config)
        mlp = LlamaMLP(config, bias=config.mlp_bias)
        return HybridDecoderLayer(config, mixer, mlp, norm_eps=config.rms_norm_eps)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with attention between two recurrent layers, of four heads in two groups."""
        return {
            "architectures": ["BambaForCausalLM"],
            "model_type": "bamba",
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 56,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "attn_layer_indices": [1],
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        }
