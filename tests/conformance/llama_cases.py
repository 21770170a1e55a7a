"""The Llama checkpoints of the oracle tests: odd shapes, biases, ties and every rope scaling, with telling seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints import random_prompts

LOGITS_PROMPT_LENGTH = 40

ODD = {
    "vocab_size": 307,
    "hidden_size": 60,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
# Wavelengths of a 24-wide head at theta 1e4: 6, 14, 29, 63, 135, ...: some above, between and below the two bounds 16
# and 64.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Case:
    """One checkpoint: its seed, what it `changes` in ODD, the keys that it `drop`s, and how its files are written."""

    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    old_rope_spelling: bool = False
    max_shard_size: str | None = None
    prompt_lengths: tuple[int, ...] = (1, 2, 7, 33)

    @property
    def config(self) -> dict[str, Any]:
        return {key: value for key, value in (ODD | dict(self.changes)).items() if key not in self.drop}

    @property
    def options(self) -> dict[str, Any]:
        return {"old_rope_spelling": self.old_rope_spelling, "max_shard_size": self.max_shard_size}

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return random_prompts(self.config["vocab_size"], self.prompt_lengths)

    @property
    def logits_prompt(self) -> tuple[int, ...]:
        (prompt,) = random_prompts(self.config["vocab_size"], (LOGITS_PROMPT_LENGTH,), seed=1)
        return prompt


def _rope(parameters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": dict(parameters) | more}


CASES: dict[str, Case] = {
    # shapes
    "explicit_head_dim": Case(0),
    "5_heads_of_24_one_kv_head": Case(0, {"hidden_size": 120}, drop=("head_dim",)),
    "6_heads_3_kv_heads": Case(
        0, {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    ),
    "7_kv_heads_of_10_key_absent": Case(
        0,
        {"hidden_size": 63, "num_attention_heads": 7, "head_dim": 10, "intermediate_size": 37},
        drop=("num_key_value_heads",),
    ),
    "one_head_of_2": Case(3, {"hidden_size": 49, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}),
    "head_dim_null": Case(
        0, {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": None, "vocab_size": 311}
    ),
    "head_wider_than_hidden": Case(0, {"hidden_size": 30, "head_dim": 66, "intermediate_size": 13}),
    "one_layer": Case(0, {"num_hidden_layers": 1}),
    # biases and ties
    "attention_bias": Case(0, {"attention_bias": True}),
    "mlp_bias": Case(0, {"mlp_bias": True}),
    "both_biases": Case(
        0, {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 6, "num_key_value_heads": 2}
    ),
    "tied": Case(0, {"tie_word_embeddings": True}),
    "tied_one_layer_both_biases": Case(
        0, {"tie_word_embeddings": True, "num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True}
    ),
    # norms
    "eps_1e-6": Case(0, {"rms_norm_eps": 1e-6}),
    "eps_1e-3": Case(1, {"rms_norm_eps": 1e-3}),
    # rope
    "default_rope_old_spelling": Case(0, old_rope_spelling=True),
    "large_theta": Case(0, _rope({"rope_type": "default", "rope_theta": 1_000_000})),
    "large_theta_old_spelling": Case(
        0, _rope({"rope_type": "default", "rope_theta": 500000.0}), old_rope_spelling=True
    ),
    "theta_without_rope_type": Case(0, _rope({"rope_theta": 3000.0})),
    "linear": Case(0, _rope(LINEAR)),
    "linear_old_spelling": Case(0, _rope(LINEAR), old_rope_spelling=True),
    "linear_oldest_spelling": Case(
        0, {"rope_parameters": {"type": "linear", "factor": 4.0, "rope_theta": 10000.0}}, old_rope_spelling=True
    ),
    # Prompts that stay below the original 32 tokens, cross them while decoding, and begin above them, in one batch.
    "dynamic": Case(0, {"max_position_embeddings": 32, **_rope(DYNAMIC)}, prompt_lengths=(1, 2, 7, 20, 33)),
    "dynamic_old_spelling": Case(0, {"max_position_embeddings": 32, **_rope(DYNAMIC)}, old_rope_spelling=True),
    "dynamic_within_original_length": Case(0, _rope(DYNAMIC)),
    "llama3": Case(0, _rope(LLAMA3)),
    "llama3_old_spelling": Case(0, _rope(LLAMA3, rope_theta=500000.0), old_rope_spelling=True),
    "yarn": Case(0, _rope(YARN)),
    "yarn_old_spelling": Case(0, _rope(YARN, rope_theta=150000.0), old_rope_spelling=True),
    "yarn_attention_factor": Case(0, _rope(YARN, attention_factor=1.3)),
    "yarn_mscale": Case(1, _rope(YARN, mscale=1.0, mscale_all_dim=0.5)),
    "yarn_betas": Case(0, _rope(YARN, beta_fast=4.0, beta_slow=0.5)),
    "yarn_not_truncated": Case(0, _rope(YARN, beta_fast=6.0, beta_slow=0.7, truncate=False)),
    "yarn_original_length_absent": Case(
        0, {"max_position_embeddings": 64, **_rope({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0})}
    ),
    # files
    "keys_with_defaults_absent": Case(
        0,
        drop=(
            "head_dim",
            "num_key_value_heads",
            "hidden_act",
            "rms_norm_eps",
            "max_position_embeddings",
            "rope_parameters",
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
        ),
    ),
    "sharded_tied_with_biases": Case(
        0, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, max_shard_size="40KB"
    ),
}
