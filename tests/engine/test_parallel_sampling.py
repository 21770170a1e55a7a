"""`n` outputs of one prompt: each is what a request of its own would give, and together they are one request."""

from __future__ import annotations

import dataclasses

import pytest
from torchplug.engine.llm import LLM
from torchplug.engine.parallel_sampling import child_params, child_seed
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
from torchplug.errors import PluginError, RequestError

HOT = SamplingParams(n=3, temperature=1.5, seed=7, max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY)
PROMPT = list(range(1, 20))


def test_outputs_differ_and_are_those_of_single_requests_with_their_seeds(engine_of, run_all):
    engine = engine_of()
    engine.add_request("many", PROMPT, HOT)
    (output,) = run_all(engine).values()
    assert (output.request_id, output.finished) == ("many", True)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    for index, params in enumerate(child_params(HOT)):
        engine.add_request(f"single {index}", PROMPT, params)
    single = run_all(engine)
    assert [one.token_ids for one in output.outputs] == [
        single[f"single {index}"].outputs[0].token_ids for index in range(3)
    ]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    engine.add_request("plain", PROMPT, dataclasses.replace(HOT, n=1))
    assert run_all(engine)["plain"].outputs[0].token_ids == output.outputs[0].token_ids


def test_the_outputs_do_not_depend_on_the_batch(engine_of, run_all):
    alone = engine_of(max_num_seqs=1)
    alone.add_request("x", PROMPT, HOT)
    crowded = engine_of(max_num_seqs=8)
    for index in range(4):
        crowded.add_request(str(index), PROMPT[: 3 + index], SamplingParams(temperature=2.0, max_tokens=9))
    crowded.add_request("x", PROMPT, HOT)
    assert run_all(crowded)["x"].outputs == run_all(alone)["x"].outputs


def test_seeds_of_outputs_are_streams_of_their_own():
    assert child_seed(7, 0) == 7 and child_seed(None, 2) is None
    seeds = {child_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 50 * 50 and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_a_running_request_tells_of_the_output_that_went_on(engine_of, run_all, kind):
    engine = engine_of()
    engine.add_request("x", PROMPT, HOT)
    final = run_all(engine)["x"]
    engine.add_request("x", PROMPT, dataclasses.replace(HOT, output_kind=kind))
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    finished = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            (one,) = output.outputs
            assert output.request_id == "x"
            tokens[one.index] = tokens[one.index] * (kind is RequestOutputKind.DELTA) + one.token_ids
            finished.append(output.finished)
    assert [tokens[index] for index in range(3)] == [one.token_ids for one in final.outputs]
    assert finished.count(True) == 1 and finished[-1]


def test_aborting_it_aborts_every_output(engine_of, run_all):
    engine = engine_of(max_num_seqs=2)
    engine.add_request("x", PROMPT, HOT)
    engine.step()
    assert "x" in engine
    with pytest.raises(RequestError, match="is in use"):
        engine.add_request("x", PROMPT, HOT)
    with pytest.raises(RequestError, match="is in use"):
        engine.add_request("1_x", PROMPT, HOT)
    engine.abort_request("x")
    assert "x" not in engine and not engine.has_unfinished_requests()
    assert engine.metrics().num_aborted == 3
    engine.add_request("x", PROMPT, HOT)
    assert len(run_all(engine)["x"].outputs) == 3 and "x" not in engine


def test_a_failed_step_takes_all_outputs_of_a_request_with_it(engine_of, tiny_model):
    module = tiny_model()
    engine = engine_of(module, max_num_seqs=2)
    engine.add_request("x", PROMPT, HOT)
    engine.add_request("waits", PROMPT, HOT)
    module.fail_at = 2
    engine.step()
    with pytest.raises(PluginError, match="RuntimeError: planted") as caught:
        engine.step()
    assert "dropped: x" in caught.value.__notes__[-1]
    assert "x" not in engine and "waits" in engine


def test_llm_returns_one_output_with_all_answers(tiny_checkpoint):
    with LLM(tiny_checkpoint, max_model_len=256) as llm:
        several = dataclasses.replace(HOT, logprobs=1)
        one, two = llm.generate(["the capital", "of"], several, use_tqdm=False)
        assert len(one.outputs) == len(two.outputs) == 3
        assert len({answer.text for answer in one.outputs}) == 3
        assert all(len(answer.logprobs) == 10 for answer in one.outputs)
        parts = list(llm.stream("the capital", HOT))
        for index in range(3):
            text = "".join(part.outputs[0].text for part in parts if part.outputs[0].index == index)
            assert text == one.outputs[index].text
