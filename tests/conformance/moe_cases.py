"""The mixture-of-experts checkpoints of the oracle tests: every way to route, dense layers between, latent attention,
with telling seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from checkpoints import random_prompts
from llama_cases import ODD
from torch import Tensor

PROMPT_LENGTHS = (1, 2, 7, 33)
LOGITS_PROMPT_LENGTH = 40
WINDOW = 8

_SHAPE = {key: value for key, value in ODD.items() if key not in ("attention_bias", "mlp_bias")}
_QWEN = {"moe_intermediate_size": 19, "num_experts": 7, "num_experts_per_tok": 3}
_WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW}
_LATENT = {
    "num_key_value_heads": 5,
    "q_lora_rank": 21,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 11,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 17,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
_YARN = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
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

FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": _SHAPE
    | {"intermediate_size": 37, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
    "Qwen2MoeForCausalLM": _SHAPE | _QWEN | {"shared_expert_intermediate_size": 31, "norm_topk_prob": False},
    "Qwen3MoeForCausalLM": _SHAPE | _QWEN | {"norm_topk_prob": True},
    "DeepseekV2ForCausalLM": {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    | _LATENT
    | {"topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": {key: value for key, value in _SHAPE.items() if key != "head_dim"}
    | _LATENT
    | {"norm_topk_prob": True},
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


CASES: dict[str, Case] = {
    "mixtral": Case("MixtralForCausalLM"),
    "mixtral-one_expert_each": Case("MixtralForCausalLM", 0, {"num_experts_per_tok": 1}),
    "mixtral-all_experts_each": Case("MixtralForCausalLM", 0, {"num_experts_per_tok": 5}),
    "mixtral-window_and_tied": Case("MixtralForCausalLM", 0, {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "mixtral-gelu": Case("MixtralForCausalLM", 1, {"hidden_act": "gelu"}),
    "mixtral-keys_with_defaults_absent": Case(
        "MixtralForCausalLM",
        0,
        {"num_attention_heads": 8, "hidden_size": 80},
        drop=(*_DEFAULTS, "sliding_window", "num_experts_per_tok", "num_local_experts"),
    ),
    "qwen2_moe": Case("Qwen2MoeForCausalLM"),
    "qwen2_moe-renormalised": Case("Qwen2MoeForCausalLM", 0, {"norm_topk_prob": True}),
    "qwen2_moe-every_second_layer": Case("Qwen2MoeForCausalLM", 0, {"decoder_sparse_step": 2}),
    "qwen2_moe-first_layer_dense_no_bias": Case("Qwen2MoeForCausalLM", 0, {"mlp_only_layers": [0], "qkv_bias": False}),
    "qwen2_moe-windows": Case("Qwen2MoeForCausalLM", 0, _WINDOWS | {"max_window_layers": 3}),
    "qwen2_moe-window_in_the_first_layer": Case("Qwen2MoeForCausalLM", 2, _WINDOWS | {"max_window_layers": 1}),
    "qwen2_moe-layer_types_and_yarn": Case(
        "Qwen2MoeForCausalLM",
        3,
        _WINDOWS
        | {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {key: value for key, value in _YARN.items() if "mscale" not in key},
        },
        old_rope_spelling=True,
    ),
    "qwen2_moe-keys_with_defaults_absent": Case(
        "Qwen2MoeForCausalLM",
        0,
        {"num_attention_heads": 16, "hidden_size": 64},
        drop=(
            *_DEFAULTS,
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "num_experts",
            "num_experts_per_tok",
            "norm_topk_prob",
        ),
    ),
    "qwen3_moe": Case("Qwen3MoeForCausalLM", 2),
    "qwen3_moe-not_renormalised": Case("Qwen3MoeForCausalLM", 0, {"norm_topk_prob": False}),
    "qwen3_moe-biases_windows_dense_layers": Case(
        "Qwen3MoeForCausalLM",
        0,
        _WINDOWS | {"attention_bias": True, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "qwen3_moe-every_second_layer": Case("Qwen3MoeForCausalLM", 1, {"decoder_sparse_step": 2}),
    "deepseek_v2": Case("DeepseekV2ForCausalLM"),
    "deepseek_v2-greedy_no_query_latent": Case(
        "DeepseekV2ForCausalLM",
        0,
        {"topk_method": "greedy", "n_group": None, "topk_group": None, "q_lora_rank": None, "attention_bias": True},
    ),
    "deepseek_v2-yarn": Case("DeepseekV2ForCausalLM", 0, {"rope_parameters": _YARN}, old_rope_spelling=True),
    "deepseek_v2-values_wider_than_keys": Case(
        "DeepseekV2ForCausalLM", 0, {"v_head_dim": 27, "first_k_dense_replace": 0}
    ),
    "deepseek_v3": Case("DeepseekV3ForCausalLM"),
    "deepseek_v3-one_group_not_renormalised": Case(
        "DeepseekV3ForCausalLM", 0, {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    ),
    "deepseek_v3-yarn": Case("DeepseekV3ForCausalLM", 0, {"rope_parameters": _YARN}, old_rope_spelling=True),
    "deepseek_v3-halves_rotated_no_query_latent": Case(
        "DeepseekV3ForCausalLM", 0, {"rope_interleave": False, "q_lora_rank": None}
    ),
    "deepseek_v3-biases_all_dense_but_the_last": Case(
        "DeepseekV3ForCausalLM", 0, {"attention_bias": True, "first_k_dense_replace": 2, "tie_word_embeddings": True}
    ),
}

BASES = {
    "mixtral": CASES["mixtral"],
    "qwen2_moe": CASES["qwen2_moe"],
    "qwen3_moe": CASES["qwen3_moe"],
    "deepseek_v2": CASES["deepseek_v2"],
    "deepseek_v3": CASES["deepseek_v3"],
}


def fuse_experts(weights: dict[str, Tensor]) -> None:
    """From one tensor for each projection of an expert to one for all experts, under the names of transformers 5."""
    layers = {name.partition(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:
        prefix = f"{layer}.experts."
        own = {name.removeprefix(prefix): name for name in list(weights) if name.startswith(prefix)}
        experts = range(1 + max(int(name.partition(".")[0]) for name in own))
        gate, up, down = ("w1", "w3", "w2") if "0.w1.weight" in own else ("gate_proj", "up_proj", "down_proj")

        def stacked(projection: str, own: dict[str, str] = own, experts: range = experts) -> Tensor:
            return torch.stack([weights.pop(own[f"{expert}.{projection}.weight"]) for expert in experts])

        fused = prefix.replace("block_sparse_moe", "mlp")
        both = torch.cat((stacked(gate), stacked(up)), dim=1)
        weights[f"{fused}gate_up_proj"], weights[f"{fused}down_proj"] = both, stacked(down)
    for name in [name for name in weights if "block_sparse_moe" in name]:
        weights[name.replace("block_sparse_moe", "mlp")] = weights.pop(name)
