"""Mistral, Qwen2 and Qwen3 equal transformers on random checkpoints: logits of a prompt, greedy tokens of a mixed batch
whose prompts end just before, at and after the window's edge; and however a prompt is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torchplug
from checkpoints import Reference, assert_same_logits, assert_same_tokens, module_logits, reference_of
from family_cases import ALTERNATING, CASES, MIXED, PROMPT_LENGTHS, WINDOW, Case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchplug.layers import Attention

pytestmark = pytest.mark.oracle

GREEDY = torchplug.SamplingParams(
    temperature=0, max_tokens=checkpoints.STEPS, ignore_eos=True, detokenize=False, logprobs=1
)


@pytest.fixture(scope="module", params=CASES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference[Case]:
    return reference_of(CASES[request.param], tmp_path_factory.mktemp("checkpoint"))


def test_logits_of_a_prompt_equal_transformers(host: Any, reference: Reference[Case]) -> None:
    module = host.load(str(reference.directory), device="cpu", dtype="float32").module
    assert windows_of(module) == reference.case.windows
    assert_same_logits(module_logits(module, reference.case.logits_prompt), reference.logits)


def test_greedy_tokens_of_a_mixed_batch_equal_transformers(reference: Reference[Case]) -> None:
    prompts = [continuation.prompt for continuation in reference.continuations]
    for output, continuation in zip(generated(reference.directory, prompts), reference.continuations, strict=True):
        assert_same_tokens(output.token_ids, continuation)


@pytest.mark.parametrize("length", PROMPT_LENGTHS)
def test_logits_of_a_prompt_around_the_windows_edge_equal_transformers(
    host: Any, windowed: dict[str, Path], length: int
) -> None:
    for name, directory in windowed.items():
        (prompt,) = checkpoints.random_prompts(CASES[name].config["vocab_size"], (length,), seed=2)
        expected = checkpoints.oracle_logits(checkpoints.oracle_model(directory), prompt)
        module = host.load(str(directory), device="cpu", dtype="float32").module
        assert_same_logits(module_logits(module, prompt), expected)


def test_a_mistral_with_layer_types_equals_transformers_ministral(host: Any, tmp_path: Path) -> None:
    case = CASES["mistral-5_heads_of_24_one_kv_head"]
    kinds = ["sliding_attention" if window else "full_attention" for window in ALTERNATING]
    config = case.config | {"layer_types": kinds}
    checkpoints.write_checkpoint(tmp_path, config, seed=case.seed, model_class="MinistralForCausalLM")
    expected = checkpoints.oracle_logits(checkpoints.oracle_model(tmp_path), case.logits_prompt)
    named = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    checkpoints.write_config(tmp_path, checkpoints.read_config(tmp_path) | named)
    module = host.load(str(tmp_path), device="cpu", dtype="float32").module
    assert windows_of(module) == ALTERNATING
    assert_same_logits(module_logits(module, case.logits_prompt), expected)


@pytest.mark.parametrize(("name", "tokens"), [("mistral", 131072), ("qwen2", 32768), ("qwen3", 32768)])
def test_the_longest_sequence_of_a_config_that_names_none_is_the_familys(
    host: Any, tmp_path: Path, name: str, tokens: int
) -> None:
    case = CASES[f"{name}-keys_with_defaults_absent"]
    checkpoints.write_checkpoint(tmp_path, case.config, seed=case.seed, **case.options)
    loaded = host.load(str(tmp_path), device="cpu", dtype="float32")
    assert loaded.vllm_config.model_config.max_model_len == tokens


# However steps are cut

WINDOWED = {
    "mistral-5_heads_of_24_one_kv_head": (WINDOW,) * 3,
    "qwen2-window_in_the_upper_layers": MIXED,
    "qwen3-layer_types_and_biases": ALTERNATING,
}


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each family with windows in its layers."""
    directories = {}
    for name, windows in WINDOWED.items():
        case = CASES[name]
        assert case.windows == windows
        directory = tmp_path_factory.mktemp("windowed")
        directories[name] = checkpoints.write_checkpoint(directory, case.config, seed=case.seed, **case.options)
    return directories


@pytest.mark.parametrize("name", WINDOWED)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.data())
def test_chunks_and_batches_give_what_one_prompt_in_one_step_gives(
    windowed: dict[str, Path], name: str, steps: st.DataObject
) -> None:
    lengths = steps.draw(st.lists(st.integers(1, 3 * WINDOW), min_size=1, max_size=5), label="prompt lengths")
    seqs = steps.draw(st.integers(1, 4), label="max_num_seqs")
    tokens = steps.draw(st.integers(seqs, 2 * WINDOW), label="max_num_batched_tokens")
    prompts = checkpoints.random_prompts(CASES[name].config["vocab_size"], lengths, seed=3)
    batch = generated(windowed[name], prompts, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    for prompt, ours in zip(prompts, batch, strict=True):
        (alone,) = generated(windowed[name], [prompt])
        assert list(ours.token_ids) == list(alone.token_ids)
        assert ours.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)


def generated(directory: Path, prompts: list[tuple[int, ...]], **limits: int) -> list[Any]:
    """The completion of each prompt, of one batch."""
    llm = torchplug.LLM(str(directory), dtype="float32", skip_tokenizer_init=True, **limits)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], GREEDY, use_tqdm=False)
    assert [list(output.prompt_token_ids) for output in outputs] == [list(prompt) for prompt in prompts]
    return [output.outputs[0] for output in outputs]


def windows_of(module: Any) -> tuple[int | None, ...]:
    return tuple(layer.sliding_window for layer in module.modules() if isinstance(layer, Attention))
