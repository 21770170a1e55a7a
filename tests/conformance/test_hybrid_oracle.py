"""LFM2, Bamba, Jamba and Granite 4 equal transformers on random checkpoints: logits of a prompt, by kernels and by
torch, and greedy tokens of a mixed batch, cut into steps anyhow, with a cold prefix cache and a warm one.

transformers is asked for whole prompts, and to continue them token by token: its Jamba is wrong when a cached call
brings several tokens, its Bamba unless it is told their positions, as `generate` does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torchplug
from checkpoints import Reference, assert_same_logits, assert_same_tokens, module_logits, reference_of
from hybrid_cases import BASES, CASES, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_cases import fuse_experts
from recurrent_cases import without_kernels
from torchplug.layers import Attention, FusedMoE, RecurrentLayer

pytestmark = pytest.mark.oracle

GREEDY = torchplug.SamplingParams(temperature=0, max_tokens=checkpoints.STEPS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference[Case]]:
    made: dict[str, Reference[Case]] = {}

    def of(name: str) -> Reference[Case]:
        if name not in made:
            made[name] = reference_of(CASES[name], tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return of


@pytest.fixture(scope="module")
def engines(reference: Callable[[str], Reference[Case]]) -> Callable[..., Any]:
    made: dict[Any, Any] = {}

    def of(name: str, **limits: int) -> Any:
        key = name, tuple(limits.items())
        if key not in made:
            directory = str(reference(name).directory)
            made[key] = torchplug.LLM(directory, dtype="float32", skip_tokenizer_init=True, **limits)
        return made[key]

    return of


def generated(llm: Any, prompts: list[tuple[int, ...]]) -> list[Any]:
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_transformers(
    host: Any, reference: Callable[[str], Reference[Case]], engines: Callable[..., Any], name: str
) -> None:
    expected = reference(name)
    model = host.load(str(expected.directory), device="cpu", dtype="float32")
    assert model.interfaces >= {"HasInnerState", "IsHybrid", "SupportsMambaPrefixCaching"}
    experts = any(isinstance(layer, FusedMoE) for layer in model.module.modules())
    assert ("MixtureOfExperts" in model.interfaces) == experts
    assert_same_logits(module_logits(model.module, CASES[name].logits_prompt), expected.logits)
    without_kernels(model.module)
    assert_same_logits(module_logits(model.module, CASES[name].logits_prompt), expected.logits)
    prompts = [continuation.prompt for continuation in expected.continuations]
    for output, continuation in zip(generated(engines(name), prompts), expected.continuations, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, continuation)


@pytest.mark.parametrize("name", BASES)
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_steps_batches_and_a_warm_cache_change_nothing(
    reference: Callable[[str], Reference[Case]], engines: Callable[..., Any], name: str, data: st.DataObject
) -> None:
    """Requests come in any order, some twice, to an engine that may have seen them before."""
    seqs, budget = data.draw(
        st.sampled_from([(1, 3), (2, 5), (3, 16), (5, 64)]), label="max_num_seqs, tokens of a step"
    )
    llm = engines(name, max_num_seqs=seqs, max_num_batched_tokens=budget, block_size=4)
    continuations = reference(name).continuations
    chosen = data.draw(st.lists(st.sampled_from(continuations), min_size=1, max_size=5), label="requests")
    outputs = generated(llm, [continuation.prompt for continuation in chosen])
    for output, continuation in zip(outputs, chosen, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, continuation)


@pytest.mark.parametrize("name", BASES)
def test_a_prefix_that_was_seen_is_not_computed_again_and_changes_nothing(
    reference: Callable[[str], Reference[Case]], engines: Callable[..., Any], name: str
) -> None:
    """Prompts of 4n - 1, 4n and 4n + 1 tokens in blocks of 4, each cold and warm, alone and together."""
    expected = reference(name)
    oracle = checkpoints.oracle_model(expected.directory)
    text = expected.continuations[-1].prompt
    prompts = [text[:length] for length in (15, 16, 17, 33)]
    wanted = [checkpoints.oracle_continuation(oracle, prompt, steps=8).tokens for prompt in prompts]
    llm = torchplug.LLM(str(expected.directory), dtype="float32", skip_tokenizer_init=True, block_size=4)
    cold = [generated(llm, [prompt])[0] for prompt in prompts]
    warm = generated(llm, prompts)
    for outputs in (cold, warm):
        assert [tuple(output.outputs[0].token_ids[:8]) for output in outputs] == wanted
    assert [output.num_cached_tokens for output in warm] == [12, 12, 16, 32]


@pytest.mark.parametrize("name", ["jamba", "granite"])
def test_a_checkpoint_with_the_other_spelling_of_the_experts_equals_transformers_too(
    host: Any, reference: Callable[[str], Reference[Case]], name: str, tmp_path: Path
) -> None:
    expected = reference(name)
    checkpoints.write_checkpoint(tmp_path, expected.case.config, seed=expected.case.seed, **expected.case.options)
    names: set[str] = set()

    def respell(weights: dict[str, torch.Tensor]) -> None:
        if name == "jamba":
            fuse_experts(weights)
        for old in [old for old in weights if "block_sparse_moe" in old]:
            new = old.replace("input_linear.weight", "experts.gate_up_proj")
            new = new.replace("output_linear.weight", "experts.down_proj").replace("router.layer", "router")
            weights[new] = weights.pop(old)
        names.update(weights)

    checkpoints.edit_weights(tmp_path, respell)
    assert any(each.endswith(".experts.gate_up_proj") for each in names)
    assert not any(".experts.0." in each or "moe.input_linear" in each for each in names)
    module = host.load(str(tmp_path), device="cpu", dtype="float32").module
    assert_same_logits(module_logits(module, expected.case.logits_prompt), expected.logits)


KINDS = {"lfm2": "rara", "bamba": "rarr", "jamba": "rarr", "granite": "rarr"}


@pytest.mark.parametrize("name", BASES)
def test_which_layer_is_which(host: Any, reference: Callable[[str], Reference[Case]], name: str) -> None:
    module = host.load(str(reference(name).directory), device="cpu", dtype="float32").module
    kinds = {RecurrentLayer: "r", Attention: "a"}
    found = [kinds[kind] for part in module.modules() for kind in kinds if isinstance(part, kind)]
    assert "".join(found) == KINDS[name]
