"""Mamba, Falcon Mamba and Mamba-2 against transformers on the same random weights, whole and continued.

transformers is asked for whole prompts, and to continue them token by token: its Mamba-1 is wrong when a cached call
brings several tokens. How prompts are cut into steps, batched and given slots is checked on our side, step against
whole. Each case is computed by the native kernels and by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from checkpoints import Reference, assert_same_logits, assert_same_tokens, module_logits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recurrent_cases import CASES, EDGES, Case, without_kernels
from state_steps import PADDING, Part, States
from torchplug.layers.cpu.build import library

pytestmark = pytest.mark.oracle

COMPUTED_BY = ("kernels", "torch")
CUT = ("mamba-72_channels_of_10", "falcon-72_channels_of_10", "mamba2-6_heads_in_3_groups")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference[Case]]:
    made: dict[str, Reference[Case]] = {}

    def of(name: str) -> Reference[Case]:
        if name not in made:
            made[name] = checkpoints.reference_of(CASES[name], tmp_path_factory.mktemp(name) / "model")
        return made[name]

    return of


@pytest.fixture(scope="module")
def loaded(host: Any, reference: Callable[[str], Reference[Case]]) -> Callable[[str, str], Any]:
    made: dict[tuple[str, str], Any] = {}

    def of(name: str, computed_by: str) -> Any:
        if computed_by == "kernels" and library() is None:
            pytest.skip("there are no kernels here")
        if (name, computed_by) not in made:
            module = host.load(str(reference(name).directory), device="cpu", dtype="float32").module
            if computed_by == "torch":
                without_kernels(module)
            made[name, computed_by] = module
        return made[name, computed_by]

    return of


@pytest.mark.parametrize("computed_by", COMPUTED_BY)
@pytest.mark.parametrize("name", CASES)
def test_logits_and_continuations_are_those_of_transformers(
    reference: Callable[[str], Reference[Case]], loaded: Callable[[str, str], Any], name: str, computed_by: str
) -> None:
    """Prompts of all lengths in one step, then one token of each request per step."""
    expected, module = reference(name), loaded(name, computed_by)
    assert_same_logits(module_logits(module, CASES[name].logits_prompt), expected.logits)
    states = States(module)
    try:
        texts = [list(continuation.prompt) for continuation in expected.continuations]
        starts = [0] * len(texts)
        for _ in range(checkpoints.STEPS):
            parts = [
                Part(slot, text, start, len(text)) for slot, (text, start) in enumerate(zip(texts, starts, strict=True))
            ]
            starts = [len(text) for text in texts]
            for text, rows in zip(texts, states.step(parts), strict=True):
                text.append(int(rows[-1].argmax()))
    finally:
        states.close()
    for text, continuation in zip(texts, expected.continuations, strict=True):
        assert_same_tokens(text[len(continuation.prompt) :], continuation)


@pytest.mark.parametrize("computed_by", COMPUTED_BY)
@pytest.mark.parametrize("name", CUT)
def test_prompts_around_the_edges_of_chunks(
    reference: Callable[[str], Reference[Case]], loaded: Callable[[str, str], Any], name: str, computed_by: str
) -> None:
    oracle, module = checkpoints.oracle_model(reference(name).directory), loaded(name, computed_by)
    for prompt in checkpoints.random_prompts(CASES[name].config["vocab_size"], EDGES):
        assert_same_logits(module_logits(module, prompt), checkpoints.oracle_logits(oracle, prompt))


@pytest.mark.parametrize("computed_by", COMPUTED_BY)
@pytest.mark.parametrize("name", CUT)
def test_a_prompt_cut_anywhere_is_the_whole_prompt(
    reference: Callable[[str], Reference[Case]], loaded: Callable[[str, str], Any], name: str, computed_by: str
) -> None:
    """Every cut, beside padding rows and another request, into a slot that holds NaN."""
    module = loaded(name, computed_by)
    prompt, other = CASES[name].logits_prompt, CASES[name].prompts[3]
    whole = reference(name).logits
    for cut in range(1, len(prompt)):
        states = States(module, num_slots=4)
        padding = Part(PADDING, other, 0, 1 + cut % 3)
        first = states.step([padding, Part(2, prompt, 0, cut)])[1]
        _, last, _ = states.step([Part(0, other, 0, len(other)), Part(2, prompt, cut, len(prompt)), padding])
        states.close()
        assert_same_logits(torch.cat((first, last)), whole)


@pytest.mark.parametrize("computed_by", COMPUTED_BY)
@pytest.mark.parametrize("name", CUT)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.data())
def test_batches_and_chunks_never_change_a_request(
    loaded: Callable[[str, str], Any], name: str, computed_by: str, steps: st.DataObject
) -> None:
    """Requests that bring any number of tokens per step, in changing order and slots; each against itself alone."""
    module = loaded(name, computed_by)
    lengths = steps.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5), label="lengths")
    slots = steps.draw(st.permutations(range(6)), label="slots")
    prompts = checkpoints.random_prompts(CASES[name].config["vocab_size"], lengths, seed=5)
    states = States(module, num_slots=6)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while left := [index for index, prompt in enumerate(prompts) if done[index] < len(prompt)]:
        chosen = steps.draw(st.lists(st.sampled_from(left), min_size=1, unique=True), label="requests")
        parts = []
        for index in chosen:
            most = len(prompts[index]) - done[index]
            new = steps.draw(st.sampled_from([1, 2, 17, most]).map(lambda n, most=most: min(n, most)), label="tokens")
            parts.append(Part(slots[index], prompts[index], done[index], done[index] + new))
            done[index] += new
        for index, result in zip(chosen, states.step(parts), strict=True):
            rows[index].append(result)
    states.close()
    for prompt, found in zip(prompts, rows, strict=True):
        assert_same_logits(torch.cat(found), module_logits(module, prompt))


@pytest.mark.parametrize("computed_by", COMPUTED_BY)
@pytest.mark.parametrize("name", CUT)
def test_a_slot_taken_over_starts_from_zero(
    reference: Callable[[str], Reference[Case]], loaded: Callable[[str, str], Any], name: str, computed_by: str
) -> None:
    """Also by a prompt of one token, which looks like a decode step."""
    module, prompt = loaded(name, computed_by), CASES[name].logits_prompt
    states = States(module, num_slots=2)
    states.step([Part(0, prompt, 0, len(prompt)), Part(1, prompt, 0, 9)])
    (first,) = states.step([Part(0, prompt, 0, 1)])
    one, two = states.step([Part(0, prompt, 1, 2), Part(1, prompt, 0, 1)])
    states.close()
    assert_same_logits(torch.cat((first, one)), module_logits(module, prompt[:2]))
    assert_same_logits(two, module_logits(module, prompt[:1]))


def test_a_step_limit_holds_in_prompts_and_in_decoding(host: Any, tmp_path: Path) -> None:
    """Against whole prompts: transformers forgets the limit when it decodes."""
    config = CASES["mamba2-6_heads_in_3_groups"].config | {"time_step_limit": (0.3, 0.9)}
    checkpoints.write_checkpoint(tmp_path, config, seed=0, model_class="Mamba2ForCausalLM")
    module = host.load(str(tmp_path), device="cpu", dtype="float32").module
    prompt = CASES["mamba2-6_heads_in_3_groups"].logits_prompt
    expected = checkpoints.oracle_logits(checkpoints.oracle_model(tmp_path), prompt)
    for _ in COMPUTED_BY:
        assert_same_logits(module_logits(module, prompt), expected)
        states = States(module)
        singly = [states.step([Part(0, prompt, at, at + 1)])[0] for at in range(len(prompt))]
        states.close()
        assert_same_logits(torch.cat(singly), expected)
        without_kernels(module)


def test_the_authors_name_of_the_table_is_read(
    host: Any, reference: Callable[[str], Reference[Case]], tmp_path: Path
) -> None:
    import shutil

    expected = reference("mamba-tied")
    shutil.copytree(expected.directory, tmp_path / "model")

    def rename(weights: dict[str, torch.Tensor]) -> None:
        weights["backbone.embedding.weight"] = weights.pop("backbone.embeddings.weight")

    checkpoints.edit_weights(tmp_path / "model", rename)
    module = host.load(str(tmp_path / "model"), device="cpu", dtype="float32").module
    assert_same_logits(module_logits(module, CASES["mamba-tied"].logits_prompt), expected.logits)
