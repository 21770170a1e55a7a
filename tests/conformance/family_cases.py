"""The Mistral, Qwen2 and Qwen3 checkpoints of the oracle tests: odd shapes, windows shorter than a prompt, per-layer
mixes, biases and ties, with telling seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints import random_prompts
from llama_cases import ODD

WINDOW = 8
# One token short of the window, exactly as long, one longer; every continuation of 24 tokens leaves the window behind.
PROMPT_LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 33)
LOGITS_PROMPT_LENGTH = 40

_SHAPE = {key: value for key, value in ODD.items() if key not in ("attention_bias", "mlp_bias")}
_MIX = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_QWEN_WINDOW_KEYS = ("use_sliding_window", "sliding_window", "max_window_layers")
_DEFAULTS = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_YARN = {"type": "yarn", "rope_theta": 1_000_000.0, "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": _SHAPE | {"sliding_window": WINDOW},
    "Qwen2ForCausalLM": {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    | {"hidden_size": 120, "use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 1},
    "Qwen3ForCausalLM": _SHAPE
    | {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "rms_norm_eps": 1e-6,
    },
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: its family and seed, what it `changes` in the family's base, and the keys that it `drop`s."""

    family: str
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    old_rope_spelling: bool = False
    windows: tuple[int | None, ...] = (None, None, None)

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


def _mistral(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("MistralForCausalLM", seed, changes or {}, **({"windows": (WINDOW,) * 3} | more))


def _qwen2(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("Qwen2ForCausalLM", seed, changes or {}, **more)


def _qwen3(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("Qwen3ForCausalLM", seed, changes or {}, **more)


MIXED = (None, WINDOW, WINDOW)
ALTERNATING = (WINDOW, None, WINDOW)

CASES: dict[str, Case] = {
    # Mistral
    "mistral-5_heads_of_24_one_kv_head": _mistral(0),
    "mistral-no_window": _mistral(0, {"sliding_window": None}, windows=(None,) * 3),
    "mistral-window_of_2": _mistral(0, {"sliding_window": 2}, windows=(2,) * 3),
    "mistral-window_of_40": _mistral(0, {"sliding_window": 40}, windows=(40,) * 3),
    "mistral-tied": _mistral(0, {"tie_word_embeddings": True}),
    "mistral-head_dim_null": _mistral(
        0, {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": None}
    ),
    "mistral-old_rope_spelling": _mistral(
        0, {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}, old_rope_spelling=True
    ),
    "mistral-keys_with_defaults_absent": _mistral(
        0, {"num_attention_heads": 8, "hidden_size": 80}, drop=(*_DEFAULTS, "sliding_window"), windows=(4096,) * 3
    ),
    # Qwen2
    "qwen2-5_heads_of_24_one_kv_head": _qwen2(0),
    "qwen2-window_in_the_upper_layers": _qwen2(0, _MIX, windows=MIXED),
    "qwen2-window_everywhere": _qwen2(0, _MIX | {"max_window_layers": 0}, windows=(WINDOW,) * 3),
    "qwen2-window_above_the_top": _qwen2(0, _MIX | {"max_window_layers": 3}),
    "qwen2-layer_types": _qwen2(0, _MIX | {"layer_types": _LAYER_TYPES}, windows=ALTERNATING),
    "qwen2-layer_types_as_saved": _qwen2(0, {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "qwen2-tied": _qwen2(0, {"tie_word_embeddings": True}),
    "qwen2-tied_with_windows": _qwen2(0, _MIX | {"tie_word_embeddings": True}, windows=MIXED),
    "qwen2-explicit_head_dim": _qwen2(0, {"hidden_size": 60, "head_dim": 24}),
    "qwen2-yarn": _qwen2(1, {"rope_parameters": _YARN}, old_rope_spelling=True),
    "qwen2-keys_with_defaults_absent": _qwen2(
        0, {"num_attention_heads": 32, "hidden_size": 128}, drop=(*_DEFAULTS, *_QWEN_WINDOW_KEYS)
    ),
    # Qwen3
    "qwen3-5_heads_of_24_one_kv_head": _qwen3(1),
    "qwen3-attention_bias": _qwen3(4, {"attention_bias": True}),
    "qwen3-tied": _qwen3(0, {"tie_word_embeddings": True}),
    "qwen3-6_heads_3_kv_heads": _qwen3(
        0, {"hidden_size": 70, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    ),
    "qwen3-window_in_the_upper_layers": _qwen3(0, _MIX, windows=MIXED),
    "qwen3-layer_types_and_biases": _qwen3(
        1, _MIX | {"layer_types": _LAYER_TYPES, "attention_bias": True}, windows=ALTERNATING
    ),
    "qwen3-eps_1e-2": _qwen3(0, {"rms_norm_eps": 1e-2}),
    "qwen3-yarn": _qwen3(4, {"rope_parameters": _YARN}, old_rope_spelling=True),
    "qwen3-keys_with_defaults_absent": _qwen3(
        0, {"num_attention_heads": 32}, drop=(*_DEFAULTS, *_QWEN_WINDOW_KEYS, "attention_bias")
    ),
}
