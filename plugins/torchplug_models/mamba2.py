"""Mamba-2: Mamba's stack with mixers that have one decay per head.

Source: Dao and Gu, Transformers are SSMs, 2024, section 7.1; config and weight names as in transformers'
Mamba2ForCausalLM, whose gated norm is over all channels even where b and c are in groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from torchplug import VllmConfig
from torchplug.layers import MambaMixer2, RecurrentLayer, StateSettings, get_act_fn, mamba2_state_shapes

from torchplug_models.mamba import MambaForCausalLM


class Mamba2ForCausalLM(MambaForCausalLM):
    """Mamba-2 with its language-model head."""

    config_defaults: ClassVar[dict[str, Any]] = {
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "conv_kernel": 4,
        "n_groups": 8,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "residual_in_fp32": True,
        "time_step_limit": (0.0, math.inf),
        "tie_word_embeddings": False,
    }

    @staticmethod
    def mixer(config: Any, settings: StateSettings) -> RecurrentLayer:
        return MambaMixer2(
            config.hidden_size,
            **mamba2_dimensions(config),
            settings=settings,
            use_bias=config.use_bias,
            use_conv_bias=config.use_conv_bias,
            activation=get_act_fn(config.hidden_act),
            norm_eps=config.layer_norm_epsilon,
            time_step_limit=time_step_limit_of(config),
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Convolution [conv_kernel - 1 + num_spec, (intermediate + 2 * groups * state) / tp], state space [heads / tp,
        head_dim, state]."""
        return mamba2_state_shapes(
            StateSettings.of(vllm_config), **mamba2_dimensions(vllm_config.model_config.hf_config)
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config with two groups of two heads."""
        return {
            "architectures": ["Mamba2ForCausalLM"],
            "model_type": "mamba2",
            "vocab_size": 128,
            "hidden_size": 32,
            "num_heads": 4,
            "head_dim": 16,
            "state_size": 8,
            "n_groups": 2,
            "num_hidden_layers": 2,
            "conv_kernel": 4,
            "expand": 2,
        }


def mamba2_dimensions(config: Any) -> dict[str, int]:
    """What both the mixer and the shapes of its state follow from."""
    return {
        "intermediate_size": int(config.expand * config.hidden_size),
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "state_size": config.state_size,
        "n_groups": config.n_groups,
        "conv_kernel": config.conv_kernel,
    }


def time_step_limit_of(config: Any) -> tuple[float, float]:
    """The least and greatest step. JSON has no infinity; transformers 5 writes {"__float__": "Infinity"}."""
    least, greatest = (
        float(bound["__float__"] if isinstance(bound, Mapping) else bound) for bound in config.time_step_limit
    )
    return least, greatest
