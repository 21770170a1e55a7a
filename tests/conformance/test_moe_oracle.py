"""Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V2 and V3 equal transformers on random checkpoints, in either spelling of
the experts: logits of a prompt, and greedy tokens of a mixed batch whatever else the batch holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torchplug
from checkpoints import Reference, assert_same_logits, assert_same_tokens, module_logits, reference_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_cases import BASES, CASES, Case, fuse_experts
from torchplug.layers import FusedMoE

pytestmark = pytest.mark.oracle

GREEDY = torchplug.SamplingParams(
    temperature=0, max_tokens=checkpoints.STEPS, ignore_eos=True, detokenize=False, logprobs=1
)


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference[Case]:
    return reference_of(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))


def test_logits_of_a_prompt_equal_transformers(host: Any, reference: Reference[Case]) -> None:
    model = host.load(str(reference.directory), device="cpu", dtype="float32")
    assert "MixtureOfExperts" in model.interfaces
    assert_same_logits(module_logits(model.module, reference.case.logits_prompt), reference.logits)


def test_greedy_tokens_of_a_mixed_batch_equal_transformers(reference: Reference[Case]) -> None:
    prompts = [continuation.prompt for continuation in reference.continuations]
    for output, continuation in zip(generated(reference.directory, prompts), reference.continuations, strict=True):
        assert_same_tokens(output.token_ids, continuation)


# -- the five families, as they are -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=BASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference[Case]:
    return reference_of(BASES[request.param], tmp_path_factory.mktemp("family"))


def test_a_checkpoint_with_fused_experts_equals_transformers_too(
    host: Any, family: Reference[Case], tmp_path: Path
) -> None:
    checkpoints.write_checkpoint(tmp_path, family.case.config, seed=family.case.seed, **family.case.options)
    names: list[str] = []

    def fuse(weights: dict[str, torch.Tensor]) -> None:
        fuse_experts(weights)
        names.extend(weights)

    checkpoints.edit_weights(tmp_path, fuse)
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    assert not any("block_sparse_moe" in name or ".experts.0." in name for name in names)
    module = host.load(str(tmp_path), device="cpu", dtype="float32").module
    assert_same_logits(module_logits(module, family.case.logits_prompt), family.logits)


def test_logits_with_a_balancer_and_moved_experts_equal_transformers(host: Any, family: Reference[Case]) -> None:
    model = host.load(str(family.directory), device="cpu", dtype="float32")
    module = model.module
    layers, logical = module.num_moe_layers, module.num_logical_experts
    load = torch.zeros(layers, logical, dtype=torch.int32)
    # Another order of slots in every layer.
    slots = torch.stack([torch.randperm(logical, generator=torch.Generator().manual_seed(n)) for n in range(layers)])
    maps = torch.full((layers, logical, 1024), -1)
    maps[:, :, 0] = slots
    model.hooks.set_eplb_state(load, maps, torch.ones(layers, logical, dtype=torch.int64))
    assert len(module.expert_weights) == layers
    for tensors, place in zip(module.expert_weights, slots, strict=True):
        for tensor in tensors:
            tensor.copy_(tensor[place.argsort()].clone())
    prompt = family.case.logits_prompt
    assert_same_logits(module_logits(module, prompt), family.logits)
    (per_token,) = {layer.top_k for layer in module.modules() if hasattr(layer, "top_k")}
    assert load.sum(dim=1).tolist() == [len(prompt) * per_token] * layers


def test_bfloat16_generates_the_same_with_slots_in_another_order(family: Reference[Case]) -> None:
    prompts = [continuation.prompt for continuation in family.continuations]
    outputs = []
    for turned in (False, True):
        llm = torchplug.LLM(str(family.directory), dtype="bfloat16", skip_tokenizer_init=True)
        module = llm.llm_engine.model.module
        layers, logical = module.num_moe_layers, module.num_logical_experts
        maps = torch.arange(logical).view(1, -1, 1).repeat(layers, 1, 1)
        module.set_eplb_state(
            torch.zeros(layers, logical, dtype=torch.int32), maps, torch.ones(layers, logical, dtype=torch.int64)
        )
        if turned:
            maps.copy_(logical - 1 - maps)
            for layer in module.modules():
                if isinstance(layer, FusedMoE):
                    for tensor in layer.get_expert_weights():
                        tensor.copy_(tensor.flip(0).clone())
        found = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], GREEDY, use_tqdm=False)
        outputs.append([tuple(output.outputs[0].token_ids) for output in found])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("name", BASES)
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.data())
def test_chunks_and_batches_give_what_one_prompt_in_one_step_gives(
    tmp_path_factory: pytest.TempPathFactory, name: str, steps: st.DataObject
) -> None:
    directory = tmp_path_factory.getbasetemp() / f"steps-{name}"
    case = BASES[name]
    if not directory.exists():
        checkpoints.write_checkpoint(directory, case.config, seed=case.seed, **case.options)
    lengths = steps.draw(st.lists(st.integers(1, 24), min_size=1, max_size=5), label="prompt lengths")
    seqs = steps.draw(st.integers(1, 4), label="max_num_seqs")
    tokens = steps.draw(st.integers(seqs, 16), label="max_num_batched_tokens")
    prompts = checkpoints.random_prompts(case.config["vocab_size"], lengths, seed=3)
    together = generated(directory, prompts, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    for prompt, ours in zip(prompts, together, strict=True):
        (alone,) = generated(directory, [prompt])
        assert list(ours.token_ids) == list(alone.token_ids)
        assert ours.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)


def test_qwen3_moe_reads_the_number_of_experts_as_transformers_5_writes_it(host: Any, tmp_path: Path) -> None:
    case = BASES["qwen3_moe"]
    checkpoints.write_checkpoint(tmp_path, case.config, seed=case.seed, **case.options)
    config = checkpoints.read_config(tmp_path)
    config["num_local_experts"] = config.pop("num_experts")
    checkpoints.write_config(tmp_path, config)
    expected = checkpoints.oracle_logits(checkpoints.oracle_model(tmp_path), case.logits_prompt)
    module = host.load(str(tmp_path), device="cpu", dtype="float32").module
    assert_same_logits(module_logits(module, case.logits_prompt), expected)


def generated(directory: Path, prompts: list[tuple[int, ...]], **limits: int) -> list[Any]:
    """The completion of each prompt, of one batch."""
    llm = torchplug.LLM(str(directory), dtype="float32", skip_tokenizer_init=True, **limits)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0] for output in outputs]
