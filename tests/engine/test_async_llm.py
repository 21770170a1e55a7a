"""`AsyncLLM`: the answers of `LLM`, for many tasks at once, with no request left behind however a task ends."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
import threading
import time
from contextlib import aclosing

import pytest
import torch
from torchplug.engine.async_llm import AsyncLLM
from torchplug.engine.llm import LLM
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
from torchplug.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DELTA = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA)
LONG = dataclasses.replace(DELTA, max_tokens=200)
PROMPTS = ["the capital", "of France is", "Paris, user: ", "a", "system: assistant: " * 4]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    torch.set_num_threads(1)
    with LLM(tiny_checkpoint, max_model_len=256) as llm:
        return {output.prompt: output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)}


@pytest.fixture
def llm(tiny_checkpoint):
    with AsyncLLM(tiny_checkpoint, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        yield llm


async def text_of(llm, prompt, params=DELTA) -> str:
    return "".join([output.outputs[0].text async for output in llm.generate(prompt, params)])


async def until_idle(llm, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while llm._engine.has_unfinished_requests():
        assert time.monotonic() < end, "a request was left behind"
        await asyncio.sleep(0.005)


def slowed(llm, seconds: float, monkeypatch) -> None:
    step = llm._engine.step
    monkeypatch.setattr(llm._engine, "step", lambda: (time.sleep(seconds), step())[1])


def test_many_tasks_get_the_answers_of_llm(llm, expected):
    async def main():
        return await asyncio.gather(*(text_of(llm, prompt) for prompt in PROMPTS * 3))

    assert asyncio.run(main()) == [expected[prompt].text for prompt in PROMPTS * 3]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_every_kind_of_output(llm, expected, kind):
    async def main():
        params = dataclasses.replace(GREEDY, output_kind=kind)
        return [output async for output in llm.generate(PROMPTS[0], params, request_id="mine")]

    outputs = asyncio.run(main())
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    ids = [output.outputs[0].token_ids for output in outputs]
    wanted = expected[PROMPTS[0]].token_ids
    if kind is RequestOutputKind.DELTA:
        assert [token for each in ids for token in each] == wanted and len(outputs) == 12
    else:
        assert ids[-1] == wanted and (kind is RequestOutputKind.CUMULATIVE or len(outputs) == 1)
    assert all(wanted[: len(each)] == each for each in ids) or kind is RequestOutputKind.DELTA
    assert outputs[-1].metrics.num_generation_tokens == 12


def test_a_slow_reader_of_cumulative_outputs_gets_the_latest(llm, expected):
    async def main():
        seen = []
        async for output in llm.generate(PROMPTS[0], GREEDY):
            seen.append(output.outputs[0].token_ids)
            await until_idle(llm)
        return seen

    seen = asyncio.run(main())
    assert len(seen) == 2 and seen[-1] == expected[PROMPTS[0]].token_ids


def test_several_outputs_of_one_prompt(llm):
    params = SamplingParams(n=3, seed=4, temperature=1.3, max_tokens=6, output_kind=RequestOutputKind.FINAL_ONLY)

    async def main():
        return [output async for output in llm.generate(PROMPTS[0], params)]

    (output,) = asyncio.run(main())
    assert [one.index for one in output.outputs] == [0, 1, 2] and all(len(one.token_ids) == 6 for one in output.outputs)


@pytest.mark.parametrize("way", ["break", "aclose", "cancel", "exception"])
def test_dropping_the_iterator_aborts_the_request(llm, way, expected):
    async def take_two():
        count = 0
        async for _ in llm.generate(PROMPTS[1], LONG):
            count += 1
            if count == 2 and way == "break":
                break
            if count == 2 and way == "exception":
                raise LookupError

    async def main():
        free = llm._engine.num_free_slots
        other = asyncio.create_task(text_of(llm, PROMPTS[0]))
        if way == "aclose":
            async with aclosing(llm.generate(PROMPTS[1], LONG)) as outputs:
                await anext(outputs)
        elif way == "cancel":
            task = asyncio.create_task(text_of(llm, PROMPTS[1], LONG))
            while not llm.metrics().num_running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "exception":
            with pytest.raises(LookupError):
                await take_two()
        else:
            await take_two()
        gc.collect()
        assert await other == expected[PROMPTS[0]].text
        await until_idle(llm)
        assert llm._engine.num_free_slots == free
        assert llm.metrics().num_aborted == 1 and llm.metrics().num_finished == 1

    asyncio.run(main())


def test_a_loop_that_ends_leaves_nothing_behind(llm, expected):
    async def leave():
        outputs = llm.generate(PROMPTS[1], LONG)
        await anext(outputs)
        leave.kept = outputs

    asyncio.run(leave())
    asyncio.run(until_idle(llm))
    assert asyncio.run(text_of(llm, PROMPTS[0])) == expected[PROMPTS[0]].text


def test_several_event_loops_at_once(llm, expected):
    found = {}

    def run(prompt):
        found[prompt] = asyncio.run(text_of(llm, prompt))

    threads = [threading.Thread(target=run, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {prompt: expected[prompt].text for prompt in PROMPTS}


def test_the_event_loop_never_waits_for_a_step(llm, monkeypatch):
    slowed(llm, 0.2, monkeypatch)

    async def main():
        longest = 0.0
        task = asyncio.create_task(text_of(llm, PROMPTS[0], dataclasses.replace(DELTA, max_tokens=3)))
        while not task.done():
            begin = time.perf_counter()
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - begin)
        return longest

    assert asyncio.run(main()) < 0.15


def test_a_bad_request_is_told_to_its_task_alone(llm, expected):
    async def main():
        results = await asyncio.gather(
            text_of(llm, ""),
            text_of(llm, PROMPTS[0]),
            text_of(llm, {"prompt_token_ids": [99999]}),
            return_exceptions=True,
        )
        assert isinstance(results[0], RequestError) and isinstance(results[2], RequestError)
        assert results[1] == expected[PROMPTS[0]].text
        async with aclosing(llm.generate(PROMPTS[1], LONG, request_id="x")) as first:
            await anext(first)
            with pytest.raises(RequestError, match="request 'x': request_id: is in use"):
                await anext(llm.generate(PROMPTS[1], LONG, request_id="x"))
            assert (await anext(first)).request_id == "x"

    asyncio.run(main())


def test_a_failed_step_reaches_every_request_in_it_and_no_other(llm, expected, monkeypatch):
    async def main():
        running = [asyncio.create_task(text_of(llm, prompt, LONG)) for prompt in PROMPTS[:4]]
        while llm.metrics().num_running < 4:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(text_of(llm, PROMPTS[4]))
        while llm.metrics().num_waiting < 1:
            await asyncio.sleep(0.001)
        run, failures = llm._engine._runner.run, [RuntimeError("planted")]

        def fail_once(batch):
            if failures:
                raise failures.pop()
            return run(batch)

        monkeypatch.setattr(llm._engine._runner, "run", fail_once)
        errors = await asyncio.gather(*running, return_exceptions=True)
        assert [type(error) for error in errors] == [RequestError] * 4 and len(set(map(id, errors))) == 4
        for error in errors:
            assert "RuntimeError: planted" in str(error) and isinstance(error.__cause__, RuntimeError)
        assert await waiting == expected[PROMPTS[4]].text
        assert await text_of(llm, PROMPTS[0]) == expected[PROMPTS[0]].text

    asyncio.run(main())


def test_a_models_failure_names_the_plugin_and_the_line(llm, expected, monkeypatch):
    def fail(hidden_states):
        raise KeyError("planted")

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(llm.model.module, "compute_logits", fail)
            with pytest.raises(RequestError) as caught:
                await text_of(llm, PROMPTS[0])
        text = str(caught.value)
        assert "plugin 'LlamaForCausalLM' (torchplug==" in text and "compute_logits" in text
        assert "KeyError: 'planted'" in text and f"see {__file__}:" in text
        assert await text_of(llm, PROMPTS[0]) == expected[PROMPTS[0]].text

    asyncio.run(main())


CHAT = [{"role": "user", "content": "the capital of France"}]


def test_chat_gives_the_answers_of_llms_chat(llm, tiny_checkpoint):
    template = {"chat_template": "{{ messages[0].content }}{{ x }}", "chat_template_kwargs": {"x": "!"}}
    with LLM(tiny_checkpoint, max_model_len=256) as plain:
        wanted = [plain.chat(CHAT, GREEDY)[0], plain.chat(CHAT, GREEDY, **template)[0]]

    async def last(**options):
        outputs = [output async for output in llm.chat(CHAT, GREEDY, **options)]
        assert len(outputs) > 1
        return outputs[-1]

    async def main():
        found = await asyncio.gather(last(), last(**template))
        for one, other in zip(found, wanted, strict=True):
            assert (one.prompt, one.outputs) == (other.prompt, other.outputs)
        async with aclosing(llm.chat(CHAT, LONG)) as outputs:  # leaving it drops the request
            await anext(outputs)
        await until_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        (None, {}, "expected a list of messages, got NoneType"),
        ([], {}, "the conversation is empty"),
        (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs: expected a dict"),
        (CHAT, {"continue_final_message": True}, "AsyncLLM.chat: continue_final_message: not served"),
        (CHAT, {"chat_templates": "x"}, "AsyncLLM.chat: chat_templates: no such argument"),
        (CHAT, {"chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"},
         "loops or grows without end"),
    ],
)  # fmt: skip
def test_a_chat_that_is_not_acceptable_is_refused(llm, messages, options, says):
    async def main():
        return [output async for output in llm.chat(messages, GREEDY, **options)]

    with pytest.raises(RequestError, match=says):
        asyncio.run(main())
    assert not llm._engine.has_unfinished_requests()


def test_an_engine_that_fails_every_time_ends_its_requests(llm, monkeypatch):
    def fail():
        raise RuntimeError("always")

    monkeypatch.setattr(llm._engine, "step", fail)
    with pytest.raises(RequestError, match="always"):
        asyncio.run(asyncio.wait_for(text_of(llm, PROMPTS[0]), 10))
    assert not llm._engine.has_unfinished_requests() and llm.is_running


def test_abort_by_id_ends_the_iterator(llm):
    async def main():
        task = asyncio.create_task(text_of(llm, PROMPTS[0], LONG))
        outputs = llm.generate(PROMPTS[0], LONG, request_id="x")
        await anext(outputs)
        await llm.abort(["x", "no such request"])
        with pytest.raises(RequestError, match="request 'x': was aborted"):
            while True:
                await anext(outputs)
        await task

    asyncio.run(main())


def test_shutdown_ends_what_runs_and_refuses_what_comes(tiny_checkpoint, monkeypatch):
    async def main():
        async with AsyncLLM(tiny_checkpoint, max_model_len=256) as llm:
            slowed(llm, 0.02, monkeypatch)
            tasks = [asyncio.create_task(text_of(llm, prompt, LONG)) for prompt in PROMPTS]
            while llm.metrics().num_running < len(PROMPTS):
                await asyncio.sleep(0.001)
            assert llm.is_running
        for error in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(error, RequestError) and "was shut down" in str(error)
        with pytest.raises(RequestError, match="was shut down"):
            await text_of(llm, PROMPTS[0])
        assert not llm.is_running
        llm.shutdown()

    asyncio.run(main())
    assert "torchplug-engine" not in {thread.name for thread in threading.enumerate()}


def test_a_forgotten_engine_stops_its_thread(tiny_checkpoint):
    llm = AsyncLLM(tiny_checkpoint, max_model_len=64)
    asyncio.run(text_of(llm, PROMPTS[0]))
    del llm
    gc.collect()
    assert "torchplug-engine" not in {thread.name for thread in threading.enumerate()}


def test_the_interpreter_ends_in_the_middle_of_a_request(tiny_checkpoint):
    code = f"""
import asyncio
from torchplug import AsyncLLM, SamplingParams
llm = AsyncLLM({str(tiny_checkpoint)!r}, max_model_len=4096, use_tqdm_on_load=False)
async def main():
    async for _ in llm.generate("the", SamplingParams(max_tokens=4000, ignore_eos=True)):
        return print("first")
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "first\n", "")


def test_hundreds_of_tasks_come_and_go(llm):
    async def one(index):
        params = dataclasses.replace(DELTA, max_tokens=1 + index % 9)
        outputs = llm.generate([5 + index % 200, 7], params)
        seen = 0
        async for output in outputs:
            seen += len(output.outputs[0].token_ids)
            if index % 3 == 0 and seen == 1 + index % 4:
                await outputs.aclose()
                return
        assert seen == 1 + index % 9

    async def main():
        await asyncio.gather(*(one(index) for index in range(200)))
        await until_idle(llm)

    asyncio.run(main())
    found = llm.metrics()
    assert found.num_finished + found.num_aborted == 200 and found.num_running == found.num_waiting == 0
