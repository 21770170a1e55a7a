"""The tour keeps its promises: every hook, as `hook_trials` tries it, and generation as it is worked out on paper."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hook_cases import CASES, Tour, weights, write_checkpoint
from hook_trials import Trial, devices, outcome, trials
from safetensors.torch import save_file
from torchplug import LLM, Host, SamplingParams
from torchplug.hookspecs import HOOKS, Phase
from torchplug.interfaces import INTERFACES
from torchplug_tour import TourForCausalLM, TourRecurrentForCausalLM


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices are faster on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tour"))


def test_every_hook_of_the_table_has_a_case():
    assert set(CASES) == set(HOOKS)


def test_the_tour_claims_every_interface_and_the_recurrent_class_the_one_that_excludes_another(checkpoint):
    host = Host()
    recurrent = host.model_class("TourRecurrentForCausalLM").interfaces
    assert recurrent == {"HasInnerState", "IsAttentionFree"}
    assert Tour(checkpoint, "cpu").model.interfaces == set(INTERFACES) - {"IsAttentionFree"}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_does_what_it_must_and_refuses_what_it_must(name, device, checkpoint):
    made = list(trials(name, checkpoint, device))
    kinds = {trial.kind for trial in made}
    faces = ["direct, model", "wrapped, model"]
    if HOOKS[name].phase is Phase.CLASS:
        faces += ["direct, class", "wrapped, class"]
    wrong = CASES[name].wrong(torch.device(device))
    assert {f"right, {face}" for face in faces} <= kinds
    assert {f"author returns wrong {fault}, {face}" for fault in wrong for face in faces} <= kinds
    assert {f"wrapper returns wrong {fault}, model" for fault in wrong} <= kinds
    assert {f"{argument} in a wrong place, wrapped" for argument in HOOKS[name].places} <= kinds
    failed = {trial.kind: text for trial in made if (text := outcome(trial))}
    assert not failed, "\n".join(f"{kind}:\n{text}" for kind, text in failed.items())


def test_a_trial_that_fails_says_so():
    def fail():
        assert False, "planted"  # noqa: B011

    assert "planted" in outcome(Trial("embed_input_ids", "right", fail))


# -- generation ------------------------------------------------------------------------------------------


def on_paper(table, head, layers, token_ids, decay):
    """Greedy next token, in plain Python floats: `layers` are (kind, gate, experts) triples."""
    stream = [list(table[token]) for token in token_ids]
    for kind, gate, experts in layers:
        read = []
        for time in range(len(stream)):
            weight = [1 / (time + 1) if kind == "attention" else decay ** (time - past) for past in range(time + 1)]
            read.append([sum(w * stream[past][i] for past, w in enumerate(weight)) for i in range(len(stream[0]))])
        stream = [[a + b for a, b in zip(row, more, strict=True)] for row, more in zip(stream, read, strict=True)]
        if gate is not None:
            for row in stream:
                scores = [dot(g, row) for g in gate]
                expert = experts[scores.index(max(scores))]
                row[:] = [x + x * e for x, e in zip(row, expert, strict=True)]
    logits = [dot(row, stream[-1]) for row in head]
    return logits.index(max(logits))


def dot(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True))


def generated(directory, prompts, count, **options):
    llm = LLM(str(directory), dtype="float32", device="cpu", skip_tokenizer_init=True, **options)
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def expected(prompts, count, follows):
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(follows(tokens))
        answers.append(tokens[len(prompt) :])
    return answers


PROMPTS = [[5], [7, 1, 30], [2, 2, 9, 11, 4, 6, 21]]


def test_it_generates_what_is_worked_out_on_paper(checkpoint):
    made = {name: tensor.tolist() for name, tensor in weights().items()}
    prefix = "language_model.layers"
    layers = [
        (kind, made[f"{prefix}.{index}.experts.gate.weight"], made[f"{prefix}.{index}.experts.weight"])
        for index, kind in enumerate(TourForCausalLM.tiny_config()["layers_block_type"])
        if kind != "none"
    ]
    table, head = made["language_model.embed_tokens.weight"], made["lm_head.weight"]
    answers = expected(PROMPTS, 8, lambda tokens: on_paper(table, head, layers, tokens, 0.5))
    assert len({token for answer in answers for token in answer}) > 3, "a model that repeats one token shows little"
    assert generated(checkpoint, PROMPTS, 8) == answers


def test_the_recurrent_class_generates_what_is_worked_out_on_paper(tmp_path):
    config = TourRecurrentForCausalLM.tiny_config()
    generator = torch.Generator().manual_seed(1)
    shape = config["vocab_size"], config["hidden_size"]
    made = {name: torch.randn(shape, generator=generator) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file(made, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"decay": 0.25}))
    table, head = made["embed_tokens.weight"].tolist(), made["lm_head.weight"].tolist()
    layers = [("mamba", None, None)]
    answers = expected(PROMPTS, 8, lambda tokens: on_paper(table, head, layers, tokens, 0.25))
    assert len({token for answer in answers for token in answer}) > 3
    assert generated(tmp_path, PROMPTS, 8) == answers


def test_an_image_in_the_prompt_changes_the_hidden_states_behind_it_and_none_before(checkpoint):
    """The hooks together, as an engine uses them: encode, merge, number the positions, run."""
    tour = Tour(checkpoint, "cpu")
    hooks = tour.model.hooks
    (name, given), *_ = CASES["embed_multimodal"].arguments(tour)[1].items()
    ids, mask = torch.tensor([3, 4, 90, 90, 5]), torch.tensor([False, False, True, True, False])
    (features,) = CASES["get_mrope_input_positions"].arguments(tour)[0][1]
    features.data["grid"] = (1, 2)
    positions, _ = hooks.get_mrope_input_positions(ids.tolist(), [features])
    states = []
    for scale in (1.0, 2.0):
        items = hooks.embed_multimodal(**{name: [given[0] * scale]})
        embeds = hooks.embed_input_ids(ids, items, is_multimodal=mask, handle_oov_mm_token=True)
        states.append(tour.module(None, positions, inputs_embeds=embeds))
    assert torch.equal(states[0][:2], states[1][:2])
    assert not torch.isclose(states[0][2:], states[1][2:]).all(-1).any()


def test_the_readme_names_every_hook_and_its_example_runs(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    stops = readme.partition("## The stops")[2].partition("## Try it")[0]
    assert set(re.findall(r"`(\w+)`", re.sub(r"\|[^|\n]*\|\n", "|\n", stops))) == set(HOOKS)
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(program, {})
    placeholder, shape, tokens = capsys.readouterr().out.splitlines()[:3]
    assert (placeholder, shape) == ("<image:1>", "torch.Size([3, 8])") and tokens.count(",") == 3


def test_a_config_with_an_unknown_layer_is_an_error_that_names_it(tmp_path, checkpoint):
    config = TourForCausalLM.tiny_config() | {"layers_block_type": ["attention", "gru"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(Exception, match="layers_block_type holds 'gru'"):
        Host().load(tmp_path, device="cpu")
