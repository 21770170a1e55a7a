"""What hybrid families share: a stack in which some layers have attention and the others a state of fixed size.

A layer is a mixer along the tokens, then an MLP, each on what a norm gives of the residual stream. Modules are called
alike in all families; a family renames what its checkpoints call otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchplug import CheckpointError, Problem, VllmConfig
from torchplug.interfaces import HasInnerState, IsHybrid, MambaStateCopyFunc, SupportsMambaPrefixCaching
from torchplug.layers import (
    MambaMixer2,
    RecurrentLayer,
    RMSNorm,
    Rotation,
    StateSettings,
    get_act_fn,
    get_conv_copy_spec,
    get_temporal_copy_spec,
    load_weights,
    mamba2_state_shapes,
)

from torchplug_models.llama import LlamaForCausalLM
from torchplug_models.mamba2 import time_step_limit_of


class HybridDecoderLayer(nn.Module):
    """A mixer (attention, which is given the rotation, or a layer with a state) and an MLP.

    What either adds to the stream is multiplied by `residual_multiplier`.
    """

    def __init__(
        self, config: Any, mixer: nn.Module, mlp: nn.Module, *, norm_eps: float, residual_multiplier: float = 1.0
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, norm_eps)
        self.mixer = mixer
        self.post_attention_layernorm = RMSNorm(config.hidden_size, norm_eps)
        self.mlp = mlp
        self.residual_multiplier = residual_multiplier
        self._is_recurrent = isinstance(mixer, RecurrentLayer)

    def forward(self, hidden_states: Tensor, rotation: Rotation | None) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        mixed = self.mixer(normed) if self._is_recurrent else self.mixer(normed, rotation)
        hidden_states = self._added(hidden_states, mixed)
        return self._added(hidden_states, self.mlp(self.post_attention_layernorm(hidden_states)))

    def _added(self, hidden_states: Tensor, more: Tensor) -> Tensor:
        return hidden_states + (more if self.residual_multiplier == 1.0 else more * self.residual_multiplier)


class HybridForCausalLM(LlamaForCausalLM, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """A hybrid stack with its language-model head; a family gives `decoder_layer` and the shapes of its state."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {}
    """Runs of components of checkpoint names and what the module calls them, as `load_weights` takes them."""

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        """The model's for the convolution, float32 for the state space, unless the cache config says otherwise."""
        return StateSettings.of(vllm_config).dtypes

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        return get_conv_copy_spec, get_temporal_copy_spec

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(self, weights, packed=self.packed_modules_mapping, rename=self.checkpoint_names)


class Mamba2HybridForCausalLM(HybridForCausalLM):
    """A hybrid whose recurrent layers are Mamba-2's, under the `mamba_...` keys of a config."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Convolution [mamba_d_conv - 1 + num_spec, (intermediate + 2 * groups * state) / tp], state space [heads / tp,
        head_dim, state]."""
        return mamba2_state_shapes(
            StateSettings.of(vllm_config), **_mamba2_dimensions(vllm_config.model_config.hf_config)
        )

    @staticmethod
    def mamba2_mixer(vllm_config: VllmConfig) -> MambaMixer2:
        """The mixer of one recurrent layer; its gated norm is over all channels."""
        config = vllm_config.model_config.hf_config
        return MambaMixer2(
            config.hidden_size,
            **_mamba2_dimensions(config),
            settings=StateSettings.of(vllm_config),
            use_bias=config.mamba_proj_bias,
            use_conv_bias=config.mamba_conv_bias,
            activation=get_act_fn(config.hidden_act),
            norm_eps=config.rms_norm_eps,
            time_step_limit=time_step_limit_of(config),
        )


def _mamba2_dimensions(config: Any) -> dict[str, int]:
    channels = int(config.mamba_expand * config.hidden_size)
    heads, size = config.mamba_n_heads, config.mamba_d_head
    return {
        "intermediate_size": channels,
        "num_heads": heads,
        "head_dim": channels // heads if size == "auto" else size,
        "state_size": config.mamba_d_state,
        "n_groups": config.mamba_n_groups,
        "conv_kernel": config.mamba_d_conv,
    }


def listed_as_attention(config: Any, key: str, index: int, *, recurrent: Sequence[str]) -> bool:
    """Whether the list `key` of a config, one type for each layer, gives layer `index` attention.

    Args:
        config: A config.json that has the key.
        key: Its name.
        index: The layer's place in the stack, from 0.
        recurrent: What this family calls a recurrent layer; attention is "full_attention" or "attention".

    Raises CheckpointError naming the key: another number of types than layers, a type of another kind.
    """
    kinds, attention = config.get(key), ("full_attention", "attention")
    says = where = ""
    if not isinstance(kinds, list) or len(kinds) != config.num_hidden_layers:
        where, says = key, f"expected one type for each of {config.num_hidden_layers} layers, found {kinds!r}"
    elif kinds[index] not in (*attention, *recurrent):
        where = f"{key}[{index}]"
        says = f"{kinds[index]!r} is not a known type; this model class has {', '.join((*attention, *recurrent))}"
    if says:
        fix = "correct the file: take the value that the model's authors published"
        raise CheckpointError("config.json", Problem(where, says, fix))
    return kinds[index] in attention
