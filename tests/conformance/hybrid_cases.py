"""The LFM2, Bamba, Jamba and Granite 4 checkpoints of the oracle tests: odd shapes and options, with telling seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints import random_prompts

PROMPT_LENGTHS = (1, 2, 7, 33)
LOGITS_PROMPT_LENGTH = 40

_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SHAPE = {
    "vocab_size": 307,
    "hidden_size": 40,
    "intermediate_size": 37,
    "num_hidden_layers": 4,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
} | _IDS
_MAMBA2 = {"mamba_n_heads": 5, "mamba_n_groups": 1, "mamba_d_state": 10, "mamba_chunk_size": 8}
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_LEFT_OUT = ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rope_parameters", *_IDS)

FAMILIES: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": _SHAPE
    | {
        "block_multiple_of": 8,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "rope_parameters": _ROPE,
    },
    "BambaForCausalLM": _SHAPE
    | _MAMBA2
    | {"attn_layer_indices": [1], "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    "JambaForCausalLM": _SHAPE
    | {
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "mamba_d_state": 10,
        "mamba_dt_rank": 5,
    },
    "GraniteMoeHybridForCausalLM": _SHAPE
    | _MAMBA2
    | {
        "shared_intermediate_size": 31,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "embedding_multiplier": 1.7,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.4,
    },
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: its family and seed, what it `changes` in the family's base, and the keys that it `drop`s."""

    family: str
    seed: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    old_rope_spelling: bool = False

    @property
    def config(self) -> dict[str, Any]:
        merged = FAMILIES[self.family] | dict(self.changes)
        return {key: value for key, value in merged.items() if key not in self.drop}

    @property
    def options(self) -> dict[str, Any]:
        return {"model_class": self.family, "old_rope_spelling": self.old_rope_spelling}

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return random_prompts(self.config["vocab_size"], PROMPT_LENGTHS)

    @property
    def logits_prompt(self) -> tuple[int, ...]:
        (prompt,) = random_prompts(self.config["vocab_size"], (LOGITS_PROMPT_LENGTH,), seed=1)
        return prompt


def _lfm2(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("Lfm2ForCausalLM", seed, changes or {}, **more)


def _bamba(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("BambaForCausalLM", seed, changes or {}, **more)


def _jamba(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("JambaForCausalLM", seed, changes or {}, **more)


def _granite(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("GraniteMoeHybridForCausalLM", seed, changes or {}, **more)


_ALL_BIASES = {"attention_bias": True, "mamba_proj_bias": True}
_NARROW_FILTER = {"mamba_d_conv": 3, "mamba_conv_bias": False}

CASES: dict[str, Case] = {
    "lfm2": _lfm2(0),
    "lfm2-biases_and_tied": _lfm2(0, {"conv_bias": True, "tie_word_embeddings": True}),
    "lfm2-filter_of_2": _lfm2(0, {"conv_L_cache": 2}),
    "lfm2-mlp_as_given": _lfm2(0, {"block_auto_adjust_ff_dim": False}),
    "lfm2-mlp_wider": _lfm2(0, {"block_ffn_dim_multiplier": 1.9, "num_key_value_heads": 5}),
    "lfm2-first_published_keys": _lfm2(
        1, {"full_attn_idxs": [2], "block_ff_dim": 53}, drop=("layer_types",), old_rope_spelling=True
    ),
    "lfm2-keys_with_defaults_absent": _lfm2(
        0, {"num_attention_heads": 8, "hidden_size": 64}, drop=(*_LEFT_OUT, "block_multiple_of")
    ),
    "bamba": _bamba(0),
    "bamba-groups_and_tied": _bamba(
        0, {"mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_head": 20, "mamba_expand": 3, "tie_word_embeddings": True}
    ),
    "bamba-all_biases": _bamba(0, _ALL_BIASES | {"mlp_bias": True}),
    "bamba-filter_of_3_no_bias": _bamba(0, _NARROW_FILTER),
    "bamba-gelu_and_a_quarter_rotated": _bamba(
        0,
        {
            "hidden_act": "gelu",
            "hidden_size": 80,
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25},
            "attn_layer_indices": [0, 3],
        },
    ),
    "bamba-keys_with_defaults_absent": _bamba(
        0,
        {"num_attention_heads": 8, "hidden_size": 64},
        drop=(*_LEFT_OUT, "mamba_n_heads", "mamba_n_groups", "mamba_d_state"),
    ),
    "jamba": _jamba(0),
    "jamba-one_expert_each_in_every_layer": _jamba(
        0, {"num_experts_per_tok": 1, "expert_layer_period": 1, "expert_layer_offset": 0}
    ),
    "jamba-no_experts_and_tied": _jamba(0, {"num_experts": 1, "tie_word_embeddings": True}),
    "jamba-biases_and_rank_auto": _jamba(0, {"mamba_proj_bias": True, "mamba_dt_rank": "auto"}),
    "jamba-filter_of_3_no_bias": _jamba(0, _NARROW_FILTER),
    "jamba-gelu_and_eps_1e-3": _jamba(0, {"hidden_act": "gelu", "rms_norm_eps": 1e-3}),
    "jamba-keys_with_defaults_absent": _jamba(
        1,
        {"num_attention_heads": 8, "hidden_size": 48, "num_hidden_layers": 5},
        drop=(
            *_LEFT_OUT,
            "attn_layer_period",
            "attn_layer_offset",
            "num_experts",
            "num_experts_per_tok",
            "mamba_d_state",
            "mamba_dt_rank",
        ),
    ),
    "granite": _granite(0),
    "granite-no_experts_rotated_and_tied": _granite(
        0, {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True}
    ),
    "granite-layers_as_first_published": _granite(0, {"layer_types": ["mamba", "mamba", "attention", "mamba"]}),
    "granite-all_biases": _granite(0, _ALL_BIASES | {"num_key_value_heads": 5}),
    "granite-filter_of_3_no_bias": _granite(1, _NARROW_FILTER | {"num_experts_per_tok": 4}),
    "granite-groups_and_gelu": _granite(
        0, {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_head": 10, "hidden_act": "gelu"}
    ),
    "granite-keys_with_defaults_absent": _granite(
        0,
        {"num_attention_heads": 4, "hidden_size": 64},
        drop=(
            *_LEFT_OUT,
            "mamba_n_heads",
            "mamba_n_groups",
            "mamba_d_state",
            "shared_intermediate_size",
            "num_local_experts",
            "num_experts_per_tok",
            "embedding_multiplier",
            "attention_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ),
    ),
}

BASES = {name: CASES[name] for name in ("lfm2", "bamba", "jamba", "granite")}
