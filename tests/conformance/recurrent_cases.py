"""The Mamba, Falcon Mamba and Mamba-2 checkpoints of the oracle tests: odd shapes, groups, filters of every length,
biases and ties, with telling seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints import random_prompts
from torch import nn
from torchplug.layers import CausalConv1d, GatedRMSNorm, MambaMixer, MambaMixer2

LOGITS_PROMPT_LENGTH = 40
PROMPT_LENGTHS = (1, 2, 3, 7, 17, 33)
EDGES = (1, 2, 3, 15, 16, 17, 63, 64, 65, 130)
"""Prompts around what scans are cut into, and shorter than a filter."""

_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_MAMBA = {
    "vocab_size": 307,
    "hidden_size": 36,
    "state_size": 10,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
    "expand": 2,
    "time_step_rank": 5,
    "tie_word_embeddings": False,
} | _IDS
_MAMBA2 = {
    "vocab_size": 307,
    "hidden_size": 36,
    "num_heads": 6,
    "head_dim": 12,
    "state_size": 10,
    "n_groups": 3,
    "num_hidden_layers": 3,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 8,
} | _IDS
FAMILIES: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": _MAMBA,
    "FalconMambaForCausalLM": _MAMBA,
    "Mamba2ForCausalLM": _MAMBA2,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: its family and seed, what it `changes` in the family's base, and the keys that it `drop`s."""

    family: str
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        merged = FAMILIES[self.family] | dict(self.changes)
        return {key: value for key, value in merged.items() if key not in self.drop}

    @property
    def options(self) -> dict[str, Any]:
        return {"model_class": self.family}

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return random_prompts(self.config["vocab_size"], PROMPT_LENGTHS)

    @property
    def logits_prompt(self) -> tuple[int, ...]:
        (prompt,) = random_prompts(self.config["vocab_size"], (LOGITS_PROMPT_LENGTH,), seed=1)
        return prompt


def _mamba(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("MambaForCausalLM", seed, changes or {}, **more)


def _falcon(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("FalconMambaForCausalLM", seed, changes or {}, **more)


def _mamba2(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("Mamba2ForCausalLM", seed, changes or {}, **more)


_DEFAULTS = ("conv_kernel", "expand", "tie_word_embeddings", *_IDS)

CASES: dict[str, Case] = {
    # Mamba
    "mamba-72_channels_of_10": _mamba(0),
    "mamba-tied": _mamba(0, {"tie_word_embeddings": True}),
    "mamba-state_of_16": _mamba(0, {"state_size": 16, "hidden_size": 40}),
    "mamba-state_of_20_channels_75": _mamba(0, {"state_size": 20, "hidden_size": 25, "expand": 3}),
    "mamba-filter_of_2": _mamba(0, {"conv_kernel": 2}),
    "mamba-filter_of_3_no_bias": _mamba(0, {"conv_kernel": 3, "use_conv_bias": False}),
    "mamba-all_biases": _mamba(0, {"use_bias": True}),
    "mamba-rank_auto": _mamba(0, {"time_step_rank": "auto"}),
    "mamba-gelu": _mamba(0, {"hidden_act": "gelu"}),
    "mamba-eps_1e-3": _mamba(0, {"layer_norm_epsilon": 1e-3}),
    "mamba-keys_with_defaults_absent": _mamba(
        0, {"hidden_size": 32}, drop=("state_size", "time_step_rank", *_DEFAULTS)
    ),
    # Falcon Mamba
    "falcon-72_channels_of_10": _falcon(1),
    "falcon-tied_filter_of_3": _falcon(0, {"tie_word_embeddings": True, "conv_kernel": 3}),
    "falcon-intermediate_size_given": _falcon(0, {"expand": 16, "intermediate_size": 80}),
    "falcon-norm_eps_1e-2": _falcon(1, {"mixer_rms_eps": 1e-2}),
    "falcon-all_biases": _falcon(1, {"use_bias": True}),
    # Mamba-2
    "mamba2-6_heads_in_3_groups": _mamba2(0),
    "mamba2-one_group": _mamba2(2, {"n_groups": 1}),
    "mamba2-a_group_for_each_head": _mamba2(0, {"n_groups": 6}),
    "mamba2-heads_of_16_states_of_16": _mamba2(
        0, {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 2}
    ),
    "mamba2-heads_of_20_states_of_33": _mamba2(
        0, {"hidden_size": 40, "num_heads": 4, "head_dim": 20, "state_size": 33, "n_groups": 2}
    ),
    "mamba2-heads_of_3": _mamba2(0, {"num_heads": 24, "head_dim": 3}),
    "mamba2-tied": _mamba2(0, {"tie_word_embeddings": True}),
    "mamba2-filter_of_2": _mamba2(0, {"conv_kernel": 2}),
    "mamba2-filter_of_3_no_bias": _mamba2(1, {"conv_kernel": 3, "use_conv_bias": False}),
    "mamba2-all_biases": _mamba2(0, {"use_bias": True}),
    "mamba2-gelu": _mamba2(0, {"hidden_act": "gelu"}),
    "mamba2-keys_with_defaults_absent": _mamba2(
        0, {"n_groups": 2, "num_heads": 4, "head_dim": 18}, drop=("state_size", *_DEFAULTS)
    ),
}


def without_kernels(module: nn.Module) -> None:
    """Let every recurrent layer compute with torch."""
    for part in module.modules():
        if isinstance(part, (MambaMixer, MambaMixer2, CausalConv1d, GatedRMSNorm)):
            part._native = None
