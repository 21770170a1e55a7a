"""Jamba: Mamba layers with inner norms, a few with attention without positions, and MLPs of which some are mixtures.

Source: Lieber et al., Jamba: A Hybrid Transformer-Mamba Language Model, 2024, sections 2 and 3; config and weight names
as in transformers' JambaForCausalLM, before and since its version 5.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn
from torchplug import VllmConfig
from torchplug.layers import (
    FusedMoE,
    FusedMoEModel,
    MambaMixer,
    StateSettings,
    TopKRouter,
    get_act_fn,
    mamba1_state_shapes,
)

from torchplug_models.hybrid import HybridDecoderLayer, HybridForCausalLM
from torchplug_models.llama import LlamaAttention, LlamaMLP


class JambaMoE(nn.Module):
    """The weights of a token's experts are their shares in the softmax over all experts."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.router = TopKRouter(
            config.hidden_size,
            config.num_experts,
            config.num_experts_per_tok,
            renormalize=False,
            prefix=f"{prefix}.router",
        )
        self.experts = FusedMoE(
            config.num_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            parallel_config=vllm_config.parallel_config,
            prefix=f"{prefix}.experts",
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.experts(hidden_states, *self.router.route(hidden_states))


class JambaForCausalLM(HybridForCausalLM, FusedMoEModel):
    """Jamba with its language-model head."""

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
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "tie_word_embeddings": False,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.set_moe_attributes()

    @staticmethod
    def rotary_embedding(config: Any) -> None:
        """None: the recurrent layers tell tokens apart by their order."""

    @staticmethod
    def decoder_layer(vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_config
        mixer: nn.Module
        if index % config.attn_layer_period == config.attn_layer_offset:
            mixer = LlamaAttention(config, f"{prefix}.mixer", qkv_bias=False, output_bias=False)
        else:
            mixer = mamba_mixer(config, StateSettings.of(vllm_config))
        mlp: nn.Module
        if config.num_experts > 1 and index % config.expert_layer_period == config.expert_layer_offset:
            mlp = JambaMoE(vllm_config, f"{prefix}.mlp")
        else:
            mlp = LlamaMLP(config, bias=False)
        return HybridDecoderLayer(config, mixer, mlp, norm_eps=config.rms_norm_eps)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Convolution [mamba_d_conv - 1, intermediate / tp], state space [intermediate / tp, state]."""
        return mamba1_state_shapes(
            StateSettings.of(vllm_config), **mamba_dimensions(vllm_config.model_config.hf_config)
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with attention between two recurrent layers, and experts in the attention layer."""
        return {
            "architectures": ["JambaForCausalLM"],
            "model_type": "jamba",
            "vocab_size": 128,
            "hidden_size": 48,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 5,
        }


def mamba_mixer(config: Any, settings: StateSettings) -> MambaMixer:
    """The mixer of one recurrent layer, whose time step, b and c go through norms."""
    rank = config.mamba_dt_rank
    return MambaMixer(
        config.hidden_size,
        **mamba_dimensions(config),
        time_step_rank=math.ceil(config.hidden_size / 16) if rank == "auto" else rank,
        settings=settings,
        use_bias=config.mamba_proj_bias,
        use_conv_bias=config.mamba_conv_bias,
        activation=get_act_fn(config.hidden_act),
        norm_eps=config.rms_norm_eps,
        norm_weights=True,
    )


def mamba_dimensions(config: Any) -> dict[str, int]:
    """What both the mixer and the shapes of its state follow from."""
    return {
        "intermediate_size": config.mamba_expand * config.hidden_size,
        "state_size": config.mamba_d_state,
        "conv_kernel": config.mamba_d_conv,
    }
