"""Log-probabilities of the prompt, logit bias, and a request's times."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
from torchplug.errors import RequestError

PROMPT = [3, 9, 9, 1, 40, 7, 22, 5, 30, 11, 2, 17, 8, 33, 6, 21, 19, 45, 0, 12, 4, 28, 14]
PARAMS = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)


def expected(module, ids) -> torch.Tensor:
    with torch.inference_mode():
        hidden = module(torch.tensor(ids), torch.arange(len(ids)))
        return module.compute_logits(hidden).log_softmax(dim=-1)


@pytest.mark.parametrize("chunk", [5, 7, 64])
@pytest.mark.parametrize("kind", ["tiny_model", "cumulative_model"])
def test_prompt_logprobs_are_the_modules_own(engine_of, run_all, request, kind, chunk):
    module = request.getfixturevalue(kind)()
    engine = engine_of(module, max_num_batched_tokens=chunk)
    engine.add_request("plain", PROMPT[:9], SamplingParams(temperature=0, max_tokens=5))
    engine.add_request("x", PROMPT, PARAMS)
    engine.add_request("all", PROMPT[:6], dataclasses.replace(PARAMS, prompt_logprobs=-1))
    engine.add_request("one token", PROMPT[:1], PARAMS)
    outputs = run_all(engine)
    wanted = expected(module, PROMPT)
    found = outputs["x"].prompt_logprobs
    assert len(found) == len(PROMPT) and found[0] is None
    for position, entries in enumerate(found[1:], 1):
        row = wanted[position - 1]
        own = entries[PROMPT[position]]
        assert own.logprob == pytest.approx(float(row[PROMPT[position]]), abs=1e-4)
        assert own.rank == int((row > row[PROMPT[position]]).sum()) + 1
        assert set(entries) == {PROMPT[position], *row.topk(2).indices.tolist()}
    assert [len(each) for each in outputs["all"].prompt_logprobs[1:]] == [48] * 5
    assert outputs["one token"].prompt_logprobs == [None]
    assert outputs["plain"].prompt_logprobs is None
    engine.add_request("again", PROMPT, dataclasses.replace(PARAMS, prompt_logprobs=None))
    assert run_all(engine)["again"].outputs[0].token_ids == outputs["x"].outputs[0].token_ids


def test_a_stream_has_them_once_and_several_outputs_have_them_together(engine_of, run_all):
    engine = engine_of()
    engine.add_request("x", PROMPT, dataclasses.replace(PARAMS, output_kind=RequestOutputKind.DELTA))
    found = []
    while engine.has_unfinished_requests():
        found += [output.prompt_logprobs for output in engine.step()]
    assert found[0] is not None and found[1:] == [None, None]
    several = dataclasses.replace(PARAMS, n=3, temperature=1.0, output_kind=RequestOutputKind.FINAL_ONLY)
    engine.add_request("y", PROMPT, several)
    assert run_all(engine)["y"].prompt_logprobs == found[0]


def test_a_bias_moves_logits_and_only_its_requests(engine_of, run_all):
    engine = engine_of()
    greedy = SamplingParams(temperature=0, max_tokens=6)
    engine.add_request("plain", PROMPT, greedy)
    plain = run_all(engine)["plain"].outputs[0].token_ids
    engine.add_request("plain", PROMPT, greedy)
    engine.add_request("forced", PROMPT, dataclasses.replace(greedy, logit_bias={13: 100}, logprobs=0))
    engine.add_request("barred", PROMPT, dataclasses.replace(greedy, logit_bias={plain[0]: -100}))
    outputs = run_all(engine)
    assert outputs["plain"].outputs[0].token_ids == plain
    assert outputs["forced"].outputs[0].token_ids == [13] * 6
    assert plain[0] not in outputs["barred"].outputs[0].token_ids
    # Log-probabilities are those of the model, not of what the bias made of it.
    row = expected(engine.model.module, PROMPT)[-1]
    assert outputs["forced"].outputs[0].logprobs[0][13].logprob == pytest.approx(float(row[13]), abs=1e-4)
    with pytest.raises(RequestError, match="logit_bias: token ids 48 are outside the vocabulary"):
        engine.add_request("z", PROMPT, dataclasses.replace(greedy, logit_bias={48: 1.0}))


def test_times_are_those_of_the_request(engine_of, run_all):
    engine = engine_of(max_num_seqs=1)
    before = time.monotonic()
    engine.add_request("first", PROMPT, SamplingParams(temperature=0, max_tokens=4))
    engine.add_request("second", PROMPT, SamplingParams(temperature=0, max_tokens=1))
    assert engine.metrics().num_waiting == 2
    outputs = run_all(engine)
    first, second = outputs["first"].metrics, outputs["second"].metrics
    assert before <= first.queued_ts <= first.scheduled_ts < first.first_token_ts < first.last_token_ts
    assert (first.num_generation_tokens, second.num_generation_tokens) == (4, 1)
    assert second.scheduled_ts >= first.last_token_ts and second.queue_time > first.queue_time
    assert first.first_token_latency == first.first_token_ts - first.queued_ts
    assert second.inter_token_time is None and second.first_token_ts == second.last_token_ts
    found = engine.metrics()
    assert (found.num_running, found.num_waiting, found.num_finished, found.num_aborted) == (0, 0, 2, 0)
    assert (found.prompt_tokens, found.generation_tokens) == (2 * len(PROMPT), 5)
    assert found.inter_token_time.mean == first.inter_token_time
    assert found.queue_time.p99 == second.queue_time and found.time_to_first_token.p50 > 0


def test_preemption_and_the_prefix_cache_change_none_of_them(engine_of, run_all):
    """A request that is computed again, or whose prompt is cached, has the tokens and figures that it has alone."""
    prompts = [PROMPT[:n] for n in (9, 23, 16, 17, 22, 4)]
    params = [
        dataclasses.replace(PARAMS, max_tokens=20),
        SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=24, output_kind=RequestOutputKind.FINAL_ONLY),
        dataclasses.replace(PARAMS, max_tokens=30, prompt_logprobs=None),
    ]
    alone, crowded = engine_of(), engine_of(block_size=4, max_num_seqs=8, kv_cache_memory_bytes=12_000)
    for repeat in range(2):  # the second time with a warm prefix cache
        wanted = {}
        for index, prompt in enumerate(prompts):
            name = f"{repeat} {index}"
            alone.add_request(name, prompt, params[index % 3])
            wanted |= run_all(alone)
            crowded.add_request(name, prompt, params[index % 3])
        found = run_all(crowded)
        assert crowded.num_held_blocks == 0 and found.keys() == wanted.keys()
        for name, output in found.items():
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in wanted[name].outputs]
            assert (output.prompt_logprobs is None) == (wanted[name].prompt_logprobs is None)
            for mine, other in zip(output.prompt_logprobs or [], wanted[name].prompt_logprobs or [], strict=True):
                assert mine is other is None or mine.keys() == other.keys()
                for token_id, entry in (mine or {}).items():
                    assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)
    assert crowded.num_preemptions > 5
