"""RecurrentGemma: layers that mix tokens by a gated linear recurrence or by attention in a window, in a fixed pattern.

Source: Botev et al., RecurrentGemma: Moving Past Transformers for Efficient Open Language Models, 2024, on top of De et
al., Griffin, 2024. Names of layers and config keys are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchplug import VllmConfig, hookimpl
from torchplug.interfaces import HasInnerState, IsHybrid, MambaCopySpec, SupportsMambaPrefixCaching
from torchplug.layers import (
    Attention,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    Rotation,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_rotary,
    get_act_and_mul,
    load_weights,
    rope_from_config,
)

from torchplug_recurrentgemma.recurrent import RecurrentBlock, copy_h, copy_inputs, state_dtypes, state_shapes


class CentredNorm(nn.Module):
    """Root-mean-square norm whose weight is kept as its distance from 1."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normal * (1 + self.weight.float())).to(x.dtype)


class LocalAttention(nn.Module):
    """Attention over the last `attention_window_size` tokens; half of each head is rotated."""

    def __init__(self, config: Any, head_size: int, prefix: str) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
        self.head_size = head_size
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_size, heads, kv_heads, bias=config.attention_bias)
        self.attn = Attention(
            heads,
            head_size,
            head_size**-0.5,
            kv_heads,
            sliding_window=config.attention_window_size,
            prefix=f"{prefix}.attn",
        )
        self.o_proj = RowParallelLinear(heads * head_size, config.hidden_size, bias=True)

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        sizes = (self.qkv_proj.q_size, self.qkv_proj.kv_size, self.qkv_proj.kv_size)
        query, key, value = self.qkv_proj(hidden_states).split(sizes, dim=-1)
        query = apply_rotary(query, rotation, self.head_size)
        key = apply_rotary(key, rotation, self.head_size)
        return self.o_proj(self.attn(query, key, value))


class GatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) * up_proj(x)); the config's intermediate_size counts both projections."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inner = config.intermediate_size // 2
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, (inner, inner), bias=True)
        self.act = get_act_and_mul(config.hidden_activation)
        self.down_proj = RowParallelLinear(inner, config.hidden_size, bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_up_proj(hidden_states)))


class GriffinLayer(nn.Module):
    """A mixer along the tokens, then an MLP, each on what a norm gives of the stream."""

    def __init__(self, config: Any, kind: str, vllm_config: VllmConfig, head_size: int, prefix: str) -> None:
        super().__init__()
        if kind not in ("recurrent", "attention"):
            raise ValueError(f"config.json: block_types holds {kind!r}, expected recurrent or attention")
        self.temporal_pre_norm = CentredNorm(config.hidden_size, config.rms_norm_eps)
        self.temporal_block: nn.Module
        if kind == "recurrent":
            self.temporal_block = RecurrentBlock(config, vllm_config)
        else:
            self.temporal_block = LocalAttention(config, head_size, f"{prefix}.temporal_block")
        self.channel_pre_norm = CentredNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_block = GatedMLP(config)

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        mixed = self.temporal_pre_norm(hidden_states)
        if isinstance(self.temporal_block, LocalAttention):
            hidden_states = hidden_states + self.temporal_block(mixed, rotation)
        else:
            hidden_states = hidden_states + self.temporal_block(mixed)
        return hidden_states + self.mlp_block(self.channel_pre_norm(hidden_states))


class RecurrentGemmaForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching):
    """RecurrentGemma with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    config_defaults: ClassVar[dict[str, Any]] = {
        "lru_width": None,
        "num_key_value_heads": None,
        "attention_window_size": 2048,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "partial_rotary_factor": 0.5,
        "block_types": ["recurrent", "recurrent", "attention"],
        "attention_bias": False,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        head_size = config.hidden_size // config.num_attention_heads
        kinds = [config.block_types[index % len(config.block_types)] for index in range(config.num_hidden_layers)]
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = rope_from_config(config, head_size, config.max_position_embeddings)
        self.layers = nn.ModuleList(
            GriffinLayer(config, kind, vllm_config, head_size, f"{prefix}.layers.{index}".lstrip("."))
            for index, kind in enumerate(kinds)
        )
        self.final_norm = CentredNorm(config.hidden_size, config.rms_norm_eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, tied_to=tied_to)
        self.soft_cap = config.logits_soft_cap
        # The published model was trained with the factor as bfloat16 holds it.
        self.normalizer = torch.tensor(config.hidden_size**0.5, dtype=torch.bfloat16).item()

    # -- class phase: the states, before any layer exists ----------------------------------------------------

    @hookimpl
    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return state_shapes(vllm_config)

    @hookimpl
    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config)

    @hookimpl
    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Callable[[Tensor, list[int], int, int], MambaCopySpec], ...]:
        return copy_inputs, copy_h

    # -- the model -------------------------------------------------------------------------------------------

    @hookimpl
    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Token embeddings, not scaled. input_ids: int64 [n]; returns [n, hidden_size]."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """All tokens of a step as one flat batch. input_ids, positions: int64 [n]; returns [n, hidden_size]."""
        hidden_states = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = hidden_states * self.normalizer
        rotation = self.rotary_emb(positions, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotation)
        return self.final_norm(hidden_states)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return torch.tanh(self.lm_head(hidden_states) / self.soft_cap) * self.soft_cap

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(self, weights, packed=self.packed_modules_mapping, rename={"model": ""})

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink, with both kinds of layers."""
        return {
            "architectures": ["RecurrentGemmaForCausalLM"],
            "model_type": "recurrent_gemma",
            "vocab_size": 96,
            "hidden_size": 48,
            "lru_width": 48,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "attention_window_size": 6,
            "max_position_embeddings": 128,
        }
