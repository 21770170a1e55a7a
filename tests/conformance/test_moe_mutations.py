"""The oracles of the mixture-of-experts families fail on the faults that set these families apart.

Faults are planted in the files that we load while the reference is made from the files as they were, or in the loaded
module. Those of the arithmetic that the families share with Llama are in test_llama_mutations.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import (
    OracleMismatch,
    assert_same_logits,
    edit_weights,
    module_logits,
    read_config,
    write_config,
)
from moe_cases import BASES, CASES, Case
from torch import Tensor
from torchplug.layers import FusedMoE, GroupScore, TopKRouter

pytestmark = pytest.mark.oracle

FAULTLESS: dict[str, Case] = BASES | {"deepseek_v2_yarn": CASES["deepseek_v2-yarn"]}


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: checkpoints.write_checkpoint(
            tmp_path_factory.mktemp(family), case.config, seed=case.seed, **case.options
        )
        for family, case in FAULTLESS.items()
    }


@pytest.fixture(scope="module")
def references(faultless: dict[str, Path]) -> dict[str, Tensor]:
    return {
        family: checkpoints.oracle_logits(checkpoints.oracle_model(directory), FAULTLESS[family].logits_prompt)
        for family, directory in faultless.items()
    }


def our_module(host: Any, directory: Path) -> Any:
    return host.load(str(directory), device="cpu", dtype="float32").module


@pytest.mark.parametrize("family", FAULTLESS)
def test_without_a_fault_the_oracle_agrees(
    host: Any, faultless: dict[str, Path], references: dict[str, Tensor], family: str
) -> None:
    module = our_module(host, faultless[family])
    assert_same_logits(module_logits(module, FAULTLESS[family].logits_prompt), references[family])


# -- faults in the files -----------------------------------------------------------------------------------------

Fault = Callable[[Path], None]


def config_says(**changes: Any) -> Fault:
    return lambda directory: write_config(directory, read_config(directory) | changes)


def rope_says(**changes: Any) -> Fault:
    def change(directory: Path) -> None:
        rope = read_config(directory)["rope_scaling"]
        config_says(rope_scaling=rope | changes)(directory)

    return change


def swapped(left: str, right: str) -> Fault:
    """The tensors that hold `left` in their names change places with those that hold `right`."""

    def swap(weights: dict[str, Tensor]) -> None:
        names = [name for name in weights if left in name]
        assert names
        for name in names:
            other = name.replace(left, right)
            weights[name], weights[other] = weights[other], weights[name]

    return lambda directory: edit_weights(directory, swap)


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Fault:
    def edit(weights: dict[str, Tensor]) -> None:
        names = [name for name in weights if part in name]
        assert names
        for name in names:
            weights[name] = change(weights[name])

    return lambda directory: edit_weights(directory, edit)


_EXPERTS: dict[str, Fault] = {
    "two experts of one layer change places": swapped("layers.1.mlp.experts.0.", "layers.1.mlp.experts.2."),
    "gate and up change places in one expert": swapped("experts.1.gate_proj", "experts.1.up_proj"),
    "one expert of one layer is empty": changed("layers.2.mlp.experts.3.down_proj", torch.zeros_like),
    "the router is 2 % too sharp": changed("mlp.gate.weight", lambda rows: rows * 1.02),
    "one expert too few for each token": config_says(num_experts_per_tok=2),
    "one expert too many for each token": config_says(num_experts_per_tok=4),
    "another activation": config_says(hidden_act="gelu"),
}
_DEEPSEEK: dict[str, Fault] = _EXPERTS | {
    "routed scaling missing": config_says(routed_scaling_factor=1.0),
    "one group more": config_says(topk_group=3),
    "one group less": config_says(topk_group=1),
    "no groups": config_says(n_group=1, topk_group=1),
    "other groups": config_says(n_group=3),
    "shared experts empty": changed("shared_experts.down_proj", torch.zeros_like),
    "key latent's norm ignored": changed("kv_a_layernorm", torch.ones_like),
    "query latent's norm ignored": changed("q_a_layernorm", torch.ones_like),
    "theta 2 % high": config_says(rope_parameters={"rope_type": "default", "rope_theta": 10200.0}),
}
FILE_FAULTS: dict[str, dict[str, Fault]] = {
    "mixtral": {
        "two experts of one layer change places": swapped(
            "1.block_sparse_moe.experts.0.", "1.block_sparse_moe.experts.2."
        ),
        "gate and up change places in one expert": swapped("experts.1.w1", "experts.1.w3"),
        "one expert of one layer is empty": changed("2.block_sparse_moe.experts.3.w2", torch.zeros_like),
        "the router is 2 % too sharp": changed("block_sparse_moe.gate", lambda rows: rows * 1.02),
        "one expert too few for each token": config_says(num_experts_per_tok=1),
        "one expert too many for each token": config_says(num_experts_per_tok=3),
        "another activation": config_says(hidden_act="gelu"),
    },
    "qwen2_moe": _EXPERTS
    | {
        "weights made to add up to 1": config_says(norm_topk_prob=True),
        "shared expert empty": changed("shared_expert.down_proj", torch.zeros_like),
        "shared expert's gate always half open": changed("shared_expert_gate", torch.zeros_like),
        "shared expert's gate upside down": changed("shared_expert_gate", torch.neg),
    },
    "qwen3_moe": _EXPERTS | {"weights left as they are": config_says(norm_topk_prob=False)},
    "deepseek_v2": _DEEPSEEK
    | {
        "no groups by the method": config_says(topk_method="greedy"),
        "weights made to add up to 1": config_says(norm_topk_prob=True),
    },
    "deepseek_v3": _DEEPSEEK
    | {
        "weights left as they are": config_says(norm_topk_prob=False),
        "correction bias ignored": changed("e_score_correction_bias", torch.zeros_like),
        "halves rotated in place of pairs": config_says(rope_interleave=False),
    },
    "deepseek_v2_yarn": {
        "temperature of the scores missing": rope_says(mscale_all_dim=0.0),
        "temperature of the rotation missing": rope_says(mscale=0.7),
        "context not stretched": config_says(rope_scaling=None),
    },
}


@pytest.mark.parametrize(
    ("family", "fault"), [(family, fault) for family in FILE_FAULTS for fault in FILE_FAULTS[family]]
)
def test_the_oracle_fails_on_a_fault_in_the_files(
    host: Any, tmp_path: Path, faultless: dict[str, Path], references: dict[str, Tensor], family: str, fault: str
) -> None:
    directory = Path(shutil.copytree(faultless[family], tmp_path / "copy"))
    FILE_FAULTS[family][fault](directory)
    with pytest.raises(OracleMismatch):
        assert_same_logits(
            module_logits(our_module(host, directory), FAULTLESS[family].logits_prompt), references[family]
        )


# -- faults that only code can have ------------------------------------------------------------------------------


def routers(module: Any) -> list[TopKRouter]:
    return [part for part in module.modules() if isinstance(part, TopKRouter)]


def experts(module: Any) -> list[FusedMoE]:
    return [part for part in module.modules() if isinstance(part, FusedMoE)]


def not_renormalised(module: Any) -> None:
    for router in routers(module):
        router.renormalize = False


def sigmoid_in_place_of_softmax(module: Any) -> None:
    for router in routers(module):
        router.scoring_func = "sigmoid"


def softmax_in_place_of_sigmoid(module: Any) -> None:
    for router in routers(module):
        router.scoring_func = "softmax"


def groups_ranked_by_their_best_two(module: Any) -> None:
    for router in routers(module):
        router.group_score = GroupScore.TOP2_SUM


def groups_ranked_by_their_best(module: Any) -> None:
    for router in routers(module):
        router.group_score = GroupScore.MAX


def bias_in_the_weights(module: Any) -> None:
    for router in routers(module):
        route = router.route

        def biased(x: Tensor, router: TopKRouter = router, route: Any = route) -> tuple[Tensor, Tensor]:
            _, chosen = route(x)
            weights = (router(x).sigmoid() + router.e_score_correction_bias).gather(-1, chosen)
            return weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor, chosen

        router.route = biased  # type: ignore[method-assign]


def weights_in_another_order(module: Any) -> None:
    for router in routers(module):
        route = router.route

        def turned(x: Tensor, route: Any = route) -> tuple[Tensor, Tensor]:
            weights, chosen = route(x)
            return weights.flip(-1), chosen

        router.route = turned  # type: ignore[method-assign]


def router_reads_the_next_token(module: Any) -> None:
    for router in routers(module):
        route = router.route
        router.route = lambda x, route=route: route(x.roll(-1, 0))  # type: ignore[method-assign]


def shared_expert_left_out(module: Any) -> None:
    for layer in experts(module):
        forward = layer.forward
        layer.forward = lambda x, w, i, shared=None, forward=forward: forward(x, w, i)  # type: ignore[method-assign]


def last_choice_forgotten(module: Any) -> None:
    for layer in experts(module):
        forward = layer.forward
        layer.forward = lambda x, w, i, s=None, forward=forward: forward(x, w[:, :-1], i[:, :-1], s)  # type: ignore[method-assign]


_SOFTMAX = (sigmoid_in_place_of_softmax, weights_in_another_order, router_reads_the_next_token, last_choice_forgotten)
CODE_FAULTS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "mixtral": (*_SOFTMAX, not_renormalised),
    "qwen2_moe": (*_SOFTMAX, shared_expert_left_out),
    "qwen3_moe": (*_SOFTMAX, not_renormalised),
    "deepseek_v2": (*_SOFTMAX, shared_expert_left_out, groups_ranked_by_their_best_two),
    "deepseek_v3": (
        softmax_in_place_of_sigmoid,
        bias_in_the_weights,
        groups_ranked_by_their_best,
        weights_in_another_order,
        shared_expert_left_out,
    ),
}


@pytest.mark.parametrize(
    ("family", "fault"), [(family, fault.__name__) for family in CODE_FAULTS for fault in CODE_FAULTS[family]]
)
def test_the_oracle_fails_on_a_fault_in_the_code(
    host: Any, faultless: dict[str, Path], references: dict[str, Tensor], family: str, fault: str
) -> None:
    module = our_module(host, faultless[family])
    (plant,) = (found for found in CODE_FAULTS[family] if found.__name__ == fault)
    plant(module)
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(module, FAULTLESS[family].logits_prompt), references[family])
