"""LlamaForCausalLM equals transformers on random checkpoints: logits of a prompt, greedy tokens of a mixed batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torchplug
from checkpoints import Reference, assert_same_logits, assert_same_tokens, module_logits, reference_of
from llama_cases import CASES, ODD, Case

pytestmark = pytest.mark.oracle

GREEDY = torchplug.SamplingParams(temperature=0, max_tokens=checkpoints.STEPS, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference[Case]:
    return reference_of(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))


def test_the_checkpoint_on_disk_is_what_the_case_says(reference: Reference[Case]) -> None:
    config = checkpoints.read_config(reference.directory)
    assert not set(reference.case.drop) & set(config)
    assert ("rope_scaling" in config) == reference.case.old_rope_spelling
    assert ("rope_parameters" in config) == (
        not reference.case.old_rope_spelling and "rope_parameters" not in reference.case.drop
    )
    shards = list(reference.directory.glob("*.safetensors"))
    assert (len(shards) > 1) == (reference.case.max_shard_size is not None)


def test_logits_of_a_prompt_equal_transformers(host: Any, reference: Reference[Case]) -> None:
    module = host.load(str(reference.directory), device="cpu", dtype="float32").module
    assert_same_logits(module_logits(module, reference.case.logits_prompt), reference.logits)


def test_greedy_tokens_of_a_mixed_batch_equal_transformers(reference: Reference[Case]) -> None:
    llm = torchplug.LLM(str(reference.directory), dtype="float32", skip_tokenizer_init=True)
    prompts = [{"prompt_token_ids": list(continuation.prompt)} for continuation in reference.continuations]
    outputs = llm.generate(prompts, GREEDY)
    assert len(outputs) == len(prompts)
    for output, continuation in zip(outputs, reference.continuations, strict=True):
        assert list(output.prompt_token_ids) == list(continuation.prompt)
        assert_same_tokens(output.outputs[0].token_ids, continuation)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Reference[Case]:
    """One checkpoint with grouped heads and biases, for what concerns generation rather than the architecture."""
    return reference_of(CASES["both_biases"], tmp_path_factory.mktemp("grouped"))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 4},  # the prompt of 33 comes in chunks, decodes beside it
        {"max_num_seqs": 1},  # one after another, in the same slot
        {"max_num_seqs": 2, "max_num_batched_tokens": 16},
    ],
    ids=str,
)
def test_greedy_tokens_do_not_depend_on_how_steps_are_cut(grouped: Reference[Case], limits: dict[str, int]) -> None:
    llm = torchplug.LLM(str(grouped.directory), dtype="float32", skip_tokenizer_init=True, **limits)
    outputs = llm.generate([{"prompt_token_ids": list(c.prompt)} for c in grouped.continuations], GREEDY)
    for output, continuation in zip(outputs, grouped.continuations, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, continuation)


@pytest.mark.parametrize("max_num_batched_tokens", [33, 40])
def test_dynamic_scaling_does_not_depend_on_how_steps_are_cut(tmp_path: Path, max_num_batched_tokens: int) -> None:
    # Past the trained length the rotation depends on the length that is being read: a prompt in chunks, if only because
    # its neighbours used up the step's budget, comes out otherwise than whole unless the engine sees to it.
    case = CASES["dynamic"]
    checkpoints.write_checkpoint(tmp_path, case.config, seed=case.seed)
    model = checkpoints.oracle_model(tmp_path)
    continuations = [checkpoints.oracle_continuation(model, prompt) for prompt in case.prompts]
    llm = torchplug.LLM(
        str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=max_num_batched_tokens
    )
    outputs = llm.generate([{"prompt_token_ids": list(c.prompt)} for c in continuations], GREEDY)
    for output, continuation in zip(outputs, continuations, strict=True):
        assert_same_tokens(output.outputs[0].token_ids, continuation)


def test_a_prompt_that_dynamic_scaling_needs_whole_and_no_step_can_hold_is_refused(tmp_path: Path) -> None:
    case = CASES["dynamic"]
    checkpoints.write_checkpoint(tmp_path, case.config, seed=case.seed)
    llm = torchplug.LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_num_batched_tokens=5)
    trained = case.config["max_position_embeddings"]
    with pytest.raises(torchplug.RequestError, match=f"load with max_num_batched_tokens={trained + 1} or more"):
        llm.generate([{"prompt_token_ids": [1] * (trained + 1)}], GREEDY)
    assert llm.generate([{"prompt_token_ids": [1] * trained}], GREEDY)[0].finished, "up to there a prompt may be cut"


def test_logprobs_of_greedy_tokens_equal_transformers(grouped: Reference[Case]) -> None:
    llm = torchplug.LLM(str(grouped.directory), dtype="float32", skip_tokenizer_init=True)
    params = torchplug.SamplingParams(
        temperature=0, max_tokens=checkpoints.STEPS, ignore_eos=True, detokenize=False, logprobs=3
    )
    continuation = grouped.continuations[2]
    (output,) = llm.generate([{"prompt_token_ids": list(continuation.prompt)}], params)
    assert_same_tokens(output.outputs[0].token_ids, continuation)
    sequence = continuation.prompt + continuation.tokens[:-1]
    logits = checkpoints.oracle_logits(checkpoints.oracle_model(grouped.directory), sequence)
    expected = logits[len(continuation.prompt) - 1 :].log_softmax(-1)
    for row, token, ours in zip(expected, continuation.tokens, output.outputs[0].logprobs, strict=True):
        values, indices = row.topk(3)
        assert set(ours) == set(indices.tolist())
        for value, index in zip(values.tolist(), indices.tolist(), strict=True):
            assert ours[index].logprob == pytest.approx(value, abs=1e-3)
        assert ours[token].rank == 1


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("explicit_head_dim", 256),
        ("linear", 640),  # interpolated 2.5 times
        ("dynamic", 64),
        ("dynamic_old_spelling", 64),
        ("llama3", 256),  # max_position_embeddings is the extended length already
        ("yarn", 256),  # four times the original 64
        ("yarn_original_length_absent", 256),  # max_position_embeddings is the original length
        ("keys_with_defaults_absent", 2048),
    ],
)
def test_rope_scaling_extends_the_longest_sequence(host: Any, tmp_path: Path, name: str, tokens: int) -> None:
    case = CASES[name]
    checkpoints.write_checkpoint(tmp_path, case.config, seed=case.seed, **case.options)
    loaded = host.load(str(tmp_path), device="cpu", dtype="float32")
    assert loaded.vllm_config.model_config.max_model_len == tokens


def test_another_activation_equals_transformers_or_is_refused_by_name(host: Any, tmp_path: Path) -> None:
    directory = checkpoints.write_checkpoint(tmp_path, ODD | {"hidden_act": "gelu_pytorch_tanh"}, seed=0)
    (prompt,) = checkpoints.random_prompts(ODD["vocab_size"], (40,))
    expected = checkpoints.oracle_logits(checkpoints.oracle_model(directory), prompt)
    try:
        module = host.load(str(directory), device="cpu", dtype="float32").module
    except torchplug.TorchplugError as error:
        assert "gelu_pytorch_tanh" in str(error)
    else:
        assert_same_logits(module_logits(module, prompt), expected)
