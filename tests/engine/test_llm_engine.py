"""The engine: what a request gives never depends on what runs beside it, and nothing leaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
from torchplug.errors import DeviceError, PluginError, RequestError

torch.set_num_threads(1)

NO_ROOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes."

PROMPT = st.lists(st.integers(0, 47), min_size=1, max_size=30)
REQUESTS = st.lists(st.tuples(PROMPT, st.integers(1, 8)), min_size=1, max_size=7)


def greedy(count: int, **others) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, **others)


@given(REQUESTS, st.integers(1, 5), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_batch_composition_and_chunking_change_no_token(
    tiny_model, reference, engine_of, run_all, requests, max_num_seqs, budget
):
    module = tiny_model()
    engine = engine_of(module, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    for index, (prompt, count) in enumerate(requests):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy(count))
    outputs = run_all(engine)
    assert all(len(ids) <= budget for ids, _ in module.calls)
    assert engine.num_free_slots == max_num_seqs and engine.num_held_blocks == 0
    engine.close()
    for index, (prompt, count) in enumerate(requests):
        output = outputs[str(index)]
        assert output.outputs[0].token_ids == reference(module, prompt, count)
        assert output.finished and output.outputs[0].finish_reason == "length"


@given(st.lists(st.tuples(st.sampled_from(["add", "step", "step", "abort"]), st.integers(0, 5)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_adding_and_aborting_at_any_time_changes_no_token_and_leaks_no_slot(
    tiny_model, reference, engine_of, run_all, actions
):
    module = tiny_model()
    engine = engine_of(module, max_num_seqs=3, max_num_batched_tokens=7)
    prompts = [[1], [5, 6, 7], list(range(20)), [9] * 8, [40, 2], list(range(30, 12, -1))]
    outputs, aborted, number = {}, set(), 0
    for action, which in actions:
        if action == "add":
            engine.add_request(str(number), {"prompt_token_ids": prompts[which]}, greedy(5))
            number += 1
        elif action == "abort":
            engine.abort_request(str(which))
            aborted.add(str(which))
        else:
            outputs.update({output.request_id: output for output in engine.step()})
        slots = [request.slot for request in engine._scheduler._owners if request is not None]
        assert len(slots) == len(set(slots)) == engine._scheduler.num_running == 3 - engine.num_free_slots
    outputs.update(run_all(engine))
    assert engine.num_free_slots == 3 and not engine.has_unfinished_requests()
    engine.close()
    for output in outputs.values():
        if output.finished:
            assert output.outputs[0].token_ids == reference(module, output.prompt_token_ids, 5)
        else:
            assert output.request_id in aborted


def test_a_model_without_our_layers_runs_on_whole_prefixes(cumulative_model, reference, engine_of, run_all):
    module = cumulative_model()
    engine = engine_of(module, max_num_seqs=2, max_num_batched_tokens=4)
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9]]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, greedy(4))
    outputs = run_all(engine)
    calls = list(module.calls)
    assert all(positions == list(range(len(ids))) for ids, positions in calls)
    for index, prompt in enumerate(prompts):
        assert outputs[str(index)].outputs[0].token_ids == reference(module, prompt, 4)
        assert prompt in [ids for ids, _ in calls]


def test_first_come_first_served_and_a_prompt_is_read_in_chunks(tiny_model, engine_of, run_all):
    module = tiny_model()
    engine = engine_of(module, max_num_seqs=2, max_num_batched_tokens=6)
    for name, prompt in (("a", [1] * 10), ("b", [2] * 3), ("c", [3])):
        engine.add_request(name, prompt, greedy(2))
    run_all(engine)
    assert [ids for ids, _ in module.calls][:2] == [[1] * 6, [1] * 4 + [2] * 2]
    assert module.calls[2][0][1:2] == [2] and module.calls[2][1] == [10, 2]  # a decodes beside the rest of b
    assert not any(3 in ids and 1 in ids for ids, _ in module.calls[:3])  # c waits for a slot


def test_eos_ends_a_request_and_its_text(tiny_model, reference, engine_of, run_all):
    module = tiny_model()
    tokens = reference(module, [1, 2, 3], 12)
    eos = tokens[5]
    first = tokens.index(eos)
    for ids in (eos, [eos, 999]):
        engine = engine_of(module, eos=ids)
        engine.add_request("stops", [1, 2, 3], greedy(12))
        engine.add_request("ignores", [1, 2, 3], greedy(12, ignore_eos=True))
        outputs = run_all(engine)
        engine.close()
        done = outputs["stops"].outputs[0]
        assert (done.token_ids, done.finish_reason, done.stop_reason) == (tokens[: first + 1], "stop", None)
        assert outputs["ignores"].outputs[0].token_ids == tokens


def test_stop_token_ids_end_a_request_and_are_named(tiny_model, reference, engine_of, run_all):
    module = tiny_model()
    tokens = reference(module, [4, 5], 12)
    engine = engine_of(module)
    engine.add_request("x", [4, 5], greedy(12, stop_token_ids=[tokens[3]], ignore_eos=True))
    done = run_all(engine)["x"].outputs[0]
    assert done.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert (done.finish_reason, done.stop_reason) == ("stop", tokens[3])


def test_min_tokens_keeps_eos_and_stop_ids_from_being_sampled(tiny_model, reference, engine_of, run_all):
    module = tiny_model()
    tokens = reference(module, [4, 5], 12)
    engine = engine_of(module, eos=tokens[1])
    engine.add_request("x", [4, 5], greedy(12, min_tokens=6, stop_token_ids=[tokens[2]]))
    done = run_all(engine)["x"].outputs[0]
    assert done.token_ids[0] == tokens[0] or tokens[0] in (tokens[1], tokens[2])
    assert not {tokens[1], tokens[2]} & set(done.token_ids[:6]) and len(done.token_ids) >= 6


def test_the_models_length_ends_a_request(engine_of, run_all):
    engine = engine_of(max_model_len=10)
    engine.add_request("none", [1, 2, 3], greedy(None))
    engine.add_request("many", [1, 2, 3], greedy(500))
    engine.add_request("one", [1] * 9, greedy(500))
    outputs = run_all(engine)
    assert [len(outputs[name].outputs[0].token_ids) for name in ("none", "many", "one")] == [7, 7, 1]
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {"length"}


def test_output_kinds(engine_of):
    engine = engine_of()
    for kind in RequestOutputKind:
        engine.add_request(kind.name, [1, 2, 3], greedy(4, output_kind=kind, logprobs=0))
    seen = {kind.name: [] for kind in RequestOutputKind}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output)
    whole = seen["FINAL_ONLY"][0].outputs[0].token_ids
    assert len(seen["FINAL_ONLY"]) == 1 and len(whole) == 4
    assert [o.outputs[0].token_ids for o in seen["CUMULATIVE"]] == [whole[:n] for n in (1, 2, 3, 4)]
    assert [o.outputs[0].token_ids for o in seen["DELTA"]] == [[token] for token in whole]
    assert [len(o.outputs[0].logprobs) for o in seen["DELTA"]] == [1, 1, 1, 1]
    final = seen["FINAL_ONLY"][0].outputs[0]
    assert final.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(final.logprobs, whole, strict=True))
    )


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "has no tokens"),
        ({"prompt_token_ids": []}, "has no tokens"),
        ([1] * 64, "has 64 tokens and needs room for a new one; max_model_len is 64"),
        ([1, 48, -1], r"token ids 48, -1 are outside the vocabulary\n  fix: use ids from 0 to 47"),
        ([1.5], "expected a list of integers"),
        ({"prompt_token_ids": "abc"}, "expected a list of integers"),
        ("text", "is a text, but there is no tokenizer"),
        ({"text": "x"}, "no such key"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, "multi_modal_data: not served by this version"),
        (7, "expected a text, token ids or a dict, got int"),
    ],
    ids=str,
)
def test_a_bad_prompt_is_refused_on_entry_and_others_go_on(engine_of, run_all, prompt, says):
    engine = engine_of()
    engine.add_request("good", [1, 2], greedy(3))
    engine.step()
    with pytest.raises(RequestError, match=says):
        engine.add_request("bad", prompt, greedy(3))
    assert list(run_all(engine)) == ["good"]


def test_bad_parameters_and_a_used_id_are_refused_on_entry(engine_of, run_all):
    engine = engine_of()
    engine.add_request("good", [1, 2], greedy(3))
    with pytest.raises(RequestError, match="is in use"):
        engine.add_request("good", [1, 2], greedy(3))
    with pytest.raises(RequestError, match="expected SamplingParams, got dict"):
        engine.add_request("x", [1, 2], {"temperature": 0})
    with pytest.raises(RequestError, match="stop texts need a tokenizer"):
        engine.add_request("x", [1, 2], greedy(3, stop="x"))
    with pytest.raises(RequestError, match="token ids 48 are outside the vocabulary"):
        engine.add_request("x", [1, 2], greedy(3, stop_token_ids=[48]))
    assert list(run_all(engine)) == ["good"]


def test_a_failing_step_propagates_frees_its_slots_and_leaves_waiting_requests(
    tiny_model, reference, engine_of, run_all
):
    module = tiny_model()
    engine = engine_of(module, max_num_seqs=2)
    for name in ("a", "b", "c"):
        engine.add_request(name, [1, 2, 3], greedy(3))
    module.fail_at = 2
    engine.step()
    with pytest.raises(PluginError, match="RuntimeError: planted") as caught:
        engine.step()
    assert "dropped: a, b" in caught.value.__notes__[0] and isinstance(caught.value.__cause__, RuntimeError)
    (problem,) = caught.value.problems
    assert caught.value.subject == "plugin 'Test' (test==1.0, test:Model)"
    assert re.fullmatch(r"forward \(.*conftest.py:\d+\)", problem.where)
    assert re.fullmatch(r"see .*conftest.py:\d+: report it to the plugin's author", problem.fix)
    line = int(problem.fix.split(":")[1])
    source = Path(problem.fix.removeprefix("see ").split(":")[0]).read_text()
    assert 'raise RuntimeError("planted")' in source.splitlines()[line - 1]
    assert engine.num_free_slots == 2 and engine.get_num_unfinished_requests() == 1
    module.fail_at = None
    outputs = run_all(engine)
    engine.close()
    assert list(outputs) == ["c"] and outputs["c"].outputs[0].token_ids == reference(module, [1, 2, 3], 3)


def test_a_method_that_fails_inside_torch_is_blamed_on_the_authors_line(tiny_model, engine_of):
    module = tiny_model()
    module.compute_logits = lambda hidden: torch.nn.functional.linear(hidden, module.head[:, :3])
    engine = engine_of(module)
    engine.add_request("a", [1, 2, 3], greedy(3))
    with pytest.raises(
        PluginError, match=r"(?s)compute_logits.*RuntimeError: mat1 and mat2.*see .*test_llm_engine.py:"
    ):
        engine.step()


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("no room"), RuntimeError(NO_ROOM)], ids=type)
@pytest.mark.parametrize("where", ["forward", "sample"])
def test_no_memory_for_a_step_is_a_device_error_and_the_engine_goes_on(
    tiny_model, engine_of, reference, run_all, monkeypatch, error, where
):
    module = tiny_model()
    engine = engine_of(module, max_num_seqs=1)
    engine.add_request("a", [1, 2, 3], greedy(3))
    engine.add_request("b", [1, 2, 3], greedy(3))

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(*((module, "forward", fail) if where == "forward" else (engine._sampler, "sample", fail)))
        with pytest.raises(
            DeviceError, match=r"(?s)running plugin 'Test'.*not enough memory.*fix: free memory, or lower"
        ):
            engine.step()
    assert engine.num_held_blocks == 0 and engine.num_free_slots == 1
    outputs = run_all(engine)
    engine.close()
    assert outputs["b"].outputs[0].token_ids == reference(module, [1, 2, 3], 3) and "a" not in outputs


def test_a_model_that_returns_the_wrong_number_of_rows_is_named(tiny_model, engine_of):
    from torchplug.errors import ContractError

    module = tiny_model()
    module.compute_logits = lambda hidden: hidden[:0]
    engine = engine_of(module)
    engine.add_request("a", [1, 2, 3], greedy(3))
    with pytest.raises(ContractError, match=r"plugin 'Test'.*compute_logits: expected a tensor with one row"):
        engine.step()
    assert engine.num_free_slots == 4


def test_no_memory_for_the_cache_is_a_device_error(tiny_model, engine_of, monkeypatch):
    from torchplug.engine import kv_cache
    from torchplug.errors import DeviceError

    def refuse(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(kv_cache, "allocate_kv_cache", refuse)
    with pytest.raises(
        DeviceError, match=r"KV cache: no memory for 49152 bytes in 2 layers\n  fix: raise kv_cache_mem"
    ):
        engine_of(tiny_model())


def test_seeded_requests_do_not_depend_on_the_batch(engine_of, run_all):
    def tokens(others: int, seqs: int) -> list[int]:
        engine = engine_of(max_num_seqs=seqs)
        for index in range(others):
            engine.add_request(f"other {index}", [index], SamplingParams(max_tokens=5, seed=index))
        engine.add_request("mine", [1, 2, 3], SamplingParams(max_tokens=12, seed=42, temperature=1.5))
        return run_all(engine)["mine"].outputs[0].token_ids

    assert tokens(0, 1) == tokens(3, 4) == tokens(3, 2)


def test_text_stops_before_a_stop_string_and_the_tokens_keep_it(tiny_model, engine_of, run_all, backends):
    from torchplug.engine.tokenizer import Tokenizer

    tokenizer = Tokenizer(backends["byte_level"]())
    module = tiny_model()
    engine = engine_of(module, tokenizer=tokenizer)
    engine.add_request("free", [1, 2, 3], greedy(16))
    free = run_all(engine)["free"].outputs[0]
    assert free.text == tokenizer.decode(free.token_ids, skip_special_tokens=True)
    stop = free.text[4:6]
    at = free.text.index(stop)
    for include in (False, True):
        engine.add_request("x", [1, 2, 3], greedy(16, stop=[stop], include_stop_str_in_output=include))
        done = run_all(engine)["x"].outputs[0]
        assert done.text == free.text[: at + (len(stop) if include else 0)]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert stop in tokenizer.decode(done.token_ids) and len(done.token_ids) < 16
    engine.add_request("stop id", [1, 2, 3], greedy(16, stop_token_ids=[free.token_ids[6]]))
    engine.add_request(
        "kept", [1, 2, 3], greedy(16, stop_token_ids=[free.token_ids[6]], include_stop_str_in_output=True)
    )
    outputs = run_all(engine)
    ids = outputs["stop id"].outputs[0].token_ids
    assert ids == free.token_ids[: free.token_ids.index(ids[-1]) + 1]
    assert outputs["stop id"].outputs[0].text == tokenizer.decode(ids[:-1], skip_special_tokens=True)
    assert outputs["kept"].outputs[0].text == tokenizer.decode(ids, skip_special_tokens=True)
    engine.add_request("none", [1, 2, 3], greedy(16, detokenize=False))
    assert run_all(engine)["none"].outputs[0].text == ""


def test_a_model_without_a_head_is_refused_before_anything_is_allocated(tiny_model, engine_of):
    from torchplug.errors import PluginError

    class Pooling(torch.nn.Module):
        def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
            return input_ids

    with pytest.raises(PluginError, match="a pooling model scores its input and generates nothing"):
        engine_of(Pooling())
