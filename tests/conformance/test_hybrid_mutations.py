"""The oracles of LFM2, Bamba, Jamba and Granite 4 fail on the faults that set these families apart.

Faults are planted in the files that we load while the reference is made from the files as they were, or in the loaded
module. Those of the mixers' own arithmetic are in test_recurrent_mutations, those of routing in test_moe_mutations.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torchplug
from checkpoints import (
    OracleMismatch,
    assert_same_logits,
    assert_same_tokens,
    edit_weights,
    module_logits,
    read_config,
    write_config,
)
from hybrid_cases import BASES, CASES, Case
from recurrent_cases import without_kernels
from torch import Tensor
from torchplug.errors import CheckpointError
from torchplug.layers import RotaryEmbedding, state_step

pytestmark = pytest.mark.oracle

FAULTLESS: dict[str, Case] = BASES | {"lfm2": CASES["lfm2-biases_and_tied"]}
Fault = Callable[[Path], None]


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


def assert_oracle(host: Any, directory: Path, family: str, reference: Tensor) -> None:
    module = host.load(str(directory), device="cpu", dtype="float32").module
    assert_same_logits(module_logits(module, FAULTLESS[family].logits_prompt), reference)


@pytest.mark.parametrize("family", FAULTLESS)
def test_without_a_fault_the_oracle_agrees(
    host: Any, faultless: dict[str, Path], references: dict[str, Tensor], family: str
) -> None:
    assert_oracle(host, faultless[family], family, references[family])


# -- faults in the files -----------------------------------------------------------------------------------------


def config_says(**changes: Any) -> Fault:
    return lambda directory: write_config(directory, read_config(directory) | changes)


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Fault:
    def edit(weights: dict[str, Tensor]) -> None:
        names = [name for name in weights if part in name]
        assert names
        for name in names:
            weights[name] = change(weights[name])

    return lambda directory: edit_weights(directory, edit)


def swapped(left: str, right: str) -> Fault:
    """The tensors that hold `left` in their names change places with those that hold `right`."""

    def swap(weights: dict[str, Tensor]) -> None:
        names = [name for name in weights if left in name]
        assert names
        for name in names:
            other = name.replace(left, right)
            weights[name], weights[other] = weights[other], weights[name]

    return lambda directory: edit_weights(directory, swap)


def thirds_swapped(rows: Tensor) -> Tensor:
    first, second, third = rows.chunk(3)
    return torch.cat((second, first, third))


def halves_swapped(rows: Tensor) -> Tensor:
    return torch.cat(rows.chunk(2, dim=-2)[::-1], dim=-2)


_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_MAMBA: dict[str, Fault] = {
    "bias of the filter dropped": changed("layers.0.mamba.conv1d.bias", torch.zeros_like),
    "filter reversed": changed("layers.0.mamba.conv1d.weight", lambda taps: taps.flip(-1)),
    "skip dropped": changed("layers.0.mamba.D", torch.zeros_like),
    "eps 1e-4 too large": config_says(rms_norm_eps=1.1e-4),
}
_MAMBA2: dict[str, Fault] = _MAMBA | {
    "bias of the step dropped": changed("layers.0.mamba.dt_bias", torch.zeros_like),
    "weight of the gated norm ignored": changed("layers.0.mamba.norm.weight", torch.ones_like),
}
FILE_FAULTS: dict[str, dict[str, Fault]] = {
    "lfm2": {
        "the two gates change places": changed("layers.0.conv.in_proj.weight", thirds_swapped),
        "bias of the filter dropped": changed("layers.0.conv.conv.bias", torch.zeros_like),
        "filter reversed": changed("layers.0.conv.conv.weight", lambda taps: taps.flip(-1)),
        "norm of the queries ignored": changed("q_layernorm", torch.ones_like),
        "norms of queries and keys change places": swapped("q_layernorm", "k_layernorm"),
        "norms before mixer and MLP change places": swapped("operator_norm", "ffn_norm"),
        "last norm ignored": changed("embedding_norm", torch.ones_like),
        "gate and up change places": swapped("feed_forward.w1", "feed_forward.w3"),
        "another rope base": config_says(rope_parameters=_ROPE | {"rope_theta": 510.0}),
        "eps 1e-4 too large": config_says(norm_eps=1.1e-4),
    },
    "bamba": _MAMBA2
    | {
        "all of a head rotated": config_says(rope_parameters=_ROPE | {"partial_rotary_factor": 1.0}),
        "norms before mixer and MLP change places": swapped("input_layernorm", "pre_ff_layernorm"),
        "last norm ignored": changed("final_layernorm", torch.ones_like),
    },
    "jamba": _MAMBA
    | {
        "norm of the step ignored": changed("layers.0.mamba.dt_layernorm", torch.ones_like),
        "norm of b ignored": changed("layers.0.mamba.b_layernorm", torch.ones_like),
        "norm of c ignored": changed("layers.0.mamba.c_layernorm", torch.ones_like),
        "two experts of one layer change places": swapped(
            "layers.1.feed_forward.experts.0.", "layers.1.feed_forward.experts.2."
        ),
        "gate and up change places in one expert": swapped("experts.1.gate_proj", "experts.1.up_proj"),
        "one expert more for each token": config_says(num_experts_per_tok=3),
        "gate and up change places in the dense layers": swapped("feed_forward.gate_proj", "feed_forward.up_proj"),
    },
    "granite": _MAMBA2
    | {
        "no multiplier of the embeddings": config_says(embedding_multiplier=1.0),
        "scores scaled as usual": config_says(attention_multiplier=8**-0.5),
        "no multiplier of what layers add": config_says(residual_multiplier=1.0),
        "no divisor of the logits": config_says(logits_scaling=1.0),
        "positions rotated": config_says(position_embedding_type="rope"),
        "gate and up of the experts change places": changed("moe.input_linear.weight", halves_swapped),
        "gate and up of the shared MLP change places": changed("shared_mlp.input_linear.weight", halves_swapped),
        "the shared MLP left out": changed("shared_mlp.output_linear.weight", torch.zeros_like),
        "one expert more for each token": config_says(num_experts_per_tok=3),
        "the router is 2 % too sharp": changed("router.layer.weight", lambda rows: rows * 1.02),
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
        assert_oracle(host, directory, family, references[family])


LAYERS_ELSEWHERE = {
    "lfm2": config_says(layer_types=["full_attention", "conv", "conv", "full_attention"]),
    "bamba": config_says(attn_layer_indices=[2]),
    "jamba": config_says(attn_layer_offset=2),
    "granite": config_says(layer_types=["mamba", "mamba", "attention", "mamba"]),
}
UNKNOWN_KINDS = {
    "lfm2": config_says(layer_types=["conv", "full_attention", "conv", "mamba"]),
    "granite": config_says(layers_block_type=["mamba", "conv", "mamba", "mamba"]),
}


@pytest.mark.parametrize("family", LAYERS_ELSEWHERE)
def test_layers_of_another_kind_than_the_weights_are_refused_by_name(
    host: Any, tmp_path: Path, faultless: dict[str, Path], family: str
) -> None:
    directory = Path(shutil.copytree(faultless[family], tmp_path / "copy"))
    LAYERS_ELSEWHERE[family](directory)
    with pytest.raises(CheckpointError, match=r"layers\..*in_proj"):
        host.load(str(directory), device="cpu", dtype="float32")


@pytest.mark.parametrize("family", UNKNOWN_KINDS)
def test_a_kind_of_layer_that_the_family_does_not_have_is_refused_by_name(
    host: Any, tmp_path: Path, faultless: dict[str, Path], family: str
) -> None:
    directory = Path(shutil.copytree(faultless[family], tmp_path / "copy"))
    UNKNOWN_KINDS[family](directory)
    with pytest.raises(CheckpointError, match=r"\[[13]\]: '(mamba|conv)' is not a known type"):
        host.load(str(directory), device="cpu", dtype="float32")


# -- faults of the modules ---------------------------------------------------------------------------------------


def weights_add_up_to_one(module: Any) -> None:
    module.model.layers[1].mlp.router.renormalize = True


def positions_rotated(module: Any) -> None:
    module.model.rotary_emb = RotaryEmbedding(torch.tensor([1.0, 0.1, 0.01, 0.001]))


def no_inner_norms(module: Any) -> None:
    module.model.layers[0].mixer.norm_eps = None


def norm_in_groups(module: Any) -> None:
    module.model.layers[0].mixer.norm.groups = 5


def filter_activated(module: Any) -> None:
    module.model.layers[0].mixer.conv.activation = torch.nn.functional.silu


MODULE_FAULTS = {
    "lfm2": (filter_activated,),
    "bamba": (norm_in_groups,),
    "jamba": (weights_add_up_to_one, positions_rotated, no_inner_norms),
    "granite": (norm_in_groups,),
}


@pytest.mark.parametrize(
    ("family", "fault"), [(family, fault) for family in MODULE_FAULTS for fault in MODULE_FAULTS[family]]
)
def test_the_oracle_fails_on_a_fault_of_the_module(
    host: Any, faultless: dict[str, Path], references: dict[str, Tensor], family: str, fault: Callable[[Any], None]
) -> None:
    module = host.load(str(faultless[family]), device="cpu", dtype="float32").module
    without_kernels(module)
    fault(module)
    with pytest.raises(OracleMismatch):
        assert_same_logits(module_logits(module, FAULTLESS[family].logits_prompt), references[family])


# -- faults of what is kept from step to step: nothing of them shows in a whole prompt ---------------------------


@pytest.mark.parametrize("family", FAULTLESS)
def test_the_oracle_fails_where_every_step_starts_from_zero(
    monkeypatch: pytest.MonkeyPatch, faultless: dict[str, Path], family: str
) -> None:
    prompt = FAULTLESS[family].prompts[-1]
    expected = checkpoints.oracle_continuation(checkpoints.oracle_model(faultless[family]), prompt)
    params = torchplug.SamplingParams(temperature=0, max_tokens=checkpoints.STEPS, ignore_eos=True, detokenize=False)

    def tokens() -> list[int]:
        llm = torchplug.LLM(str(faultless[family]), dtype="float32", skip_tokenizer_init=True)
        without_kernels(llm.llm_engine.model.module)
        (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    assert_same_tokens(tokens(), expected)
    read = state_step.Slots.read
    monkeypatch.setattr(state_step.Slots, "read", lambda slots, *rest: read(slots, *rest).zero_())
    with pytest.raises(OracleMismatch):
        assert_same_tokens(tokens(), expected)
