"""Mamba: a stack of norms and selective state-space mixers, without attention, MLP or positions.

Source: Gu and Dao, Mamba, 2023, section 3.4; config and weight names as in transformers' MambaForCausalLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchplug import VllmConfig, hookimpl
from torchplug.interfaces import HasInnerState, IsAttentionFree, MambaStateCopyFunc, SupportsMambaPrefixCaching
from torchplug.layers import (
    MambaMixer,
    ParallelLMHead,
    RecurrentLayer,
    RMSNorm,
    StateSettings,
    VocabParallelEmbedding,
    get_act_fn,
    get_conv_copy_spec,
    get_temporal_copy_spec,
    load_weights,
    mamba1_state_shapes,
)


class MambaBlock(nn.Module):
    def __init__(self, config: Any, mixer: RecurrentLayer) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mixer = mixer

    def forward(self, residual: Tensor, dtype: torch.dtype) -> Tensor:
        return residual + self.mixer(self.norm(residual.to(dtype)))


class MambaModel(nn.Module):
    def __init__(self, config: Any, mixers: Iterable[RecurrentLayer]) -> None:
        super().__init__()
        self.embeddings = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MambaBlock(config, mixer) for mixer in mixers)
        self.norm_f = RMSNorm(config.hidden_size, config.layer_norm_epsilon)
        self.residual_in_fp32 = config.residual_in_fp32

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        if self.residual_in_fp32:
            hidden_states = hidden_states.float()
        for layer in self.layers:
            hidden_states = layer(hidden_states, dtype)
        return self.norm_f(hidden_states.to(dtype))


class MambaForCausalLM(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    """Mamba with its language-model head. A family with other mixers replaces `mixer` and the shapes of its state."""

    config_defaults: ClassVar[dict[str, Any]] = {
        "state_size": 16,
        "layer_norm_epsilon": 1e-5,
        "expand": 2,
        "intermediate_size": None,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "residual_in_fp32": True,
        "time_step_rank": "auto",
        "tie_word_embeddings": True,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        settings = StateSettings.of(vllm_config)
        self.backbone = MambaModel(config, [self.mixer(config, settings) for _ in range(config.num_hidden_layers)])
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.backbone.embeddings if config.tie_word_embeddings else None,
        )

    @staticmethod
    def mixer(config: Any, settings: StateSettings) -> RecurrentLayer:
        """The mixer of one layer; all are alike."""
        return MambaMixer(config.hidden_size, **mamba_options(config), settings=settings)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Convolution [conv_kernel - 1, intermediate / tp], state space [intermediate / tp, state]."""
        config = vllm_config.model_config.hf_config
        return mamba1_state_shapes(
            StateSettings.of(vllm_config),
            intermediate_size=intermediate_size_of(config),
            state_size=config.state_size,
            conv_kernel=config.conv_kernel,
        )

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """The model's for the convolution, float32 for the state space, unless the cache config says otherwise."""
        return StateSettings.of(vllm_config).dtypes

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        return get_conv_copy_spec, get_temporal_copy_spec

    @hookimpl
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.backbone.embeddings(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.backbone(self.backbone.embeddings(input_ids) if inputs_embeds is None else inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # The authors' own checkpoints have the table in the singular.
        return load_weights(self, weights, rename={"backbone.embedding": "backbone.embeddings"})

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink."""
        return {
            "architectures": ["MambaForCausalLM"],
            "model_type": "mamba",
            "vocab_size": 128,
            "hidden_size": 48,
            "state_size": 8,
            "num_hidden_layers": 2,
            "conv_kernel": 4,
            "expand": 2,
            "time_step_rank": 5,
        }


def intermediate_size_of(config: Any) -> int:
    """Channels of the mixers; Falcon Mamba's checkpoints give the number, and a factor that does not make it up."""
    return config.intermediate_size or int(config.expand * config.hidden_size)


def mamba_options(config: Any) -> dict[str, Any]:
    """Arguments of MambaMixer after the hidden size, except its settings."""
    rank = config.time_step_rank
    return {
        "intermediate_size": intermediate_size_of(config),
        "state_size": config.state_size,
        "time_step_rank": math.ceil(config.hidden_size / 16) if rank == "auto" else rank,
        "conv_kernel": config.conv_kernel,
        "use_bias": config.use_bias,
        "use_conv_bias": config.use_conv_bias,
        "activation": get_act_fn(config.hidden_act),
    }
