"""`LLM`: vLLM's calls and results, on a small checkpoint and on the demo model."""

from __future__ import annotations

import dataclasses
import inspect
import signal
import subprocess
import sys
import threading

import pytest
import torch
from torchplug.engine.llm import LLM
from torchplug.engine.sampling_params import SamplingParams
from torchplug.errors import CheckpointError, DeviceError, PluginError, RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CHAT = [{"role": "user", "content": "the capital of France"}]


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    torch.set_num_threads(1)
    with LLM(tiny_checkpoint, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        yield llm


def tokens(output) -> list[int]:
    return output.outputs[0].token_ids


def test_every_form_of_prompt_gives_the_same_answer(llm):
    text = "the capital"
    ids = llm.get_tokenizer().encode(text)
    forms = [
        text,
        [text],
        {"prompt": text},
        {"prompt_token_ids": ids},
        ids,
        [{"prompt": text, "prompt_token_ids": ids}],
    ]
    answers = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    assert len({tuple(tokens(answer)) for (answer,) in answers}) == 1
    (first,) = answers[0]
    assert (first.prompt, first.prompt_token_ids, first.finished) == (text, ids, True)
    assert first.outputs[0].text == llm.get_tokenizer().decode(tokens(first), skip_special_tokens=True)
    assert answers[3][0].prompt is None
    assert len({answer.request_id for (answer,) in answers}) == len(forms)


def test_results_come_in_the_order_of_the_prompts_with_parameters_of_their_own(llm):
    prompts = ["the", "capital of France is " * 5, "Paris", "of", "is", "user"]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (9, 1, 5, 2, 12, 3)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(tokens(output)) for output in outputs] == [9, 1, 5, 2, 12, 3]
    assert outputs == [
        dataclasses.replace(llm.generate(prompt, one)[0], request_id=output.request_id)
        for prompt, one, output in zip(prompts, params, outputs, strict=True)
    ]


def test_nothing_to_generate_is_nothing(llm):
    assert llm.generate([]) == []


def test_chat_applies_the_template(llm):
    (answer,) = llm.chat(CHAT, GREEDY)
    assert answer.prompt == "<s>user: the capital of France</s>\n<s>assistant:"
    assert tokens(answer) == tokens(llm.generate(answer.prompt, GREEDY)[0])
    several = llm.chat([CHAT, [{"role": "system", "content": "x"}, *CHAT]], GREEDY)
    assert tokens(several[0]) == tokens(answer) and several[1].prompt.startswith("<s>system: x</s>")
    (other,) = llm.chat(CHAT, GREEDY, chat_template="{{ messages[0].content }}{{ x }}", chat_template_kwargs={"x": "!"})
    assert other.prompt == "the capital of France!"
    assert llm.chat(CHAT, GREEDY, add_generation_prompt=False)[0].prompt.endswith("</s>\n")


def test_bad_prompts_are_named_by_index_before_anything_runs(llm, monkeypatch):
    engine = llm.llm_engine
    monkeypatch.setattr(type(engine), "step", lambda self: pytest.fail("a step was taken"))
    with pytest.raises(RequestError) as caught:
        llm.generate(["fine", "", {"prompt_token_ids": [99999]}, "x" * 3000], GREEDY)
    assert [problem.where.split(":")[0] for problem in caught.value.problems] == ["prompt 1", "prompt 2", "prompt 3"]
    with pytest.raises(RequestError, match=r"conversation 1: .*no tools here"):
        llm.chat([CHAT, [{"role": "tool", "content": "x"}]], GREEDY)
    with pytest.raises(RequestError, match="2 for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="expected SamplingParams or a list of them"):
        llm.generate("a", {"temperature": 0})
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda llm: llm.generate("a", lora_request=object()),
            "LLM.generate: lora_request: not served by this version",
        ),
        (lambda llm: llm.generate("a", sampling_param=1), "LLM.generate: sampling_param: no such argument"),
        (lambda llm: llm.chat(CHAT, continue_final_message=True), "continue_final_message: not served by this version"),
        (
            lambda llm: llm.chat(None),
            "LLM.chat: messages: expected a conversation or a list of conversations, got None",
        ),
        (lambda llm: llm.chat("hello"), "expected a conversation or a list of conversations, got str"),
        (lambda llm: llm.chat([None]), "conversation 0: messages: expected a list of messages, got NoneType"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs="x"), "chat_template_kwargs: expected a dict of variables"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={3: 4}), "chat_template_kwargs: expected a dict of variables"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={"messages": []}), "'messages' is given otherwise"),
        (lambda llm: llm.chat(CHAT, chat_template_kwargs={"tools": []}), "'tools' is given otherwise"),
        (lambda llm: llm.chat(CHAT, add_generation_prompt="no"), "add_generation_prompt: expected True or False"),
        (lambda llm: llm.chat(CHAT, tools={"name": "f"}), "tools: expected a list of schemas, got dict"),
        (lambda llm: llm.chat(CHAT, chat_template=3), "expected Jinja source, got int"),
    ],
)
def test_arguments_of_a_call_that_are_not_served_are_refused(llm, call, says):
    with pytest.raises(RequestError, match=says):
        call(llm)


def test_arguments_of_the_constructor_are_all_checked_before_loading(tiny_checkpoint):
    with pytest.raises(RequestError) as caught:
        LLM(tiny_checkpoint, max_model_length=5, tensor_parallel_size=2, enable_prefix_caching="yes", max_num_seqs=0)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "did you mean 'max_model_len'?" in text and "tensor_parallel_size" in text and "not served" in text
    assert "enable_prefix_caching" in text
    with pytest.raises(CheckpointError, match="demo"):
        LLM("no/such/model")


@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
def test_any_block_size_gives_the_same_answers(tiny_checkpoint, llm, block_size, capfd):
    """256 is larger than every prompt here, and than all but the longest request."""
    prompts = ["the", "the capital of France is Paris " * 4, "the capital of France is Rome"]
    wanted = [tokens(output) for output in llm.generate(prompts, GREEDY)]
    with LLM(tiny_checkpoint, max_model_len=300, max_num_seqs=3, block_size=block_size, kv_cache_gib=0.25) as other:
        assert other.llm_engine.kv_cache.block_size == block_size
        for _ in range(2):  # a cold prefix cache, and a warm one
            assert [tokens(output) for output in other.generate(prompts, GREEDY)] == wanted
        assert other.llm_engine.num_held_blocks == 0
        assert str(other.llm_engine.kv_cache) in capfd.readouterr().err


def test_bad_words_and_allowed_tokens(llm):
    text = llm.get_tokenizer()
    (free,) = llm.generate("the capital", GREEDY)
    word = text.decode(tokens(free)[3:5])
    (other,) = llm.generate("the capital", dataclasses.replace(GREEDY, bad_words=[word]))
    assert tokens(other)[:3] == tokens(free)[:3] and tokens(other) != tokens(free)
    ids = text.encode(word, add_special_tokens=False)
    assert not any(tokens(other)[at : at + len(ids)] == ids for at in range(12))
    allowed = sorted({*tokens(free)[:2], 40, 41})
    (few,) = llm.generate("the capital", dataclasses.replace(GREEDY, allowed_token_ids=allowed))
    assert set(tokens(few)) <= set(allowed) and tokens(few)[:2] == tokens(free)[:2]
    (ended,) = llm.generate("the", dataclasses.replace(GREEDY, allowed_token_ids=[2], min_tokens=2))
    assert (ended.outputs[0].finish_reason, len(tokens(ended))) == ("error", 1)
    assert ended.outputs[0].stop_reason == "no token is left that may be sampled here"
    for bad in ({"allowed_token_ids": [10**6]}, {"stop_token_ids": [10**6]}, {"logit_bias": {10**6: 1}}):
        with pytest.raises(RequestError, match=rf"{next(iter(bad))}: token ids 1000000 are outside the vocabulary"):
            llm.generate("the", dataclasses.replace(GREEDY, **bad))


def test_the_size_of_the_cache_is_printed_unless_loading_shall_be_silent(tiny_checkpoint, capfd):
    for silent in (False, True):
        with LLM(tiny_checkpoint, use_tqdm_on_load=not silent, kv_cache_gib=0.001, max_num_seqs=100) as llm:
            cache = llm.llm_engine.kv_cache
            assert 0 < cache.num_bytes <= 0.001 * 2**30 and cache.concurrency < 100
            assert capfd.readouterr().err == ("" if silent else f"{cache}\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"block_size": 0}, "block_size: expected an integer of at least 1, got 0"),
        ({"block_size": True}, "block_size: expected an integer"),
        ({"block_size": 16.0}, "block_size: expected an integer"),
        ({"kv_cache_gib": 0}, "kv_cache_gib: expected a number of GiB above 0, got 0"),
        ({"kv_cache_gib": float("nan")}, "kv_cache_gib: expected a number of GiB"),
        ({"kv_cache_gib": "2"}, "kv_cache_gib: expected a number of GiB above 0, got '2'"),
        ({"kv_cache_gib": 1, "kv_cache_memory_bytes": 2**30}, "kv_cache_memory_bytes says the same in bytes"),
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization: not served .*\n.*give kv_cache_gib"),
        ({"num_gpu_blocks_override": 9}, "num_gpu_blocks_override: not served .*\n.*give kv_cache_gib"),
    ],
)
def test_sizes_of_the_cache_are_checked_before_loading(arguments, says):
    with pytest.raises(RequestError, match=says):
        LLM("no/such/model", **arguments)


@pytest.mark.parametrize("value", [10**9, 10**18, 10**400], ids=["9", "18", "400"])
def test_absurd_sizes_are_refused_with_what_they_need(tiny_checkpoint, value):
    with pytest.raises(DeviceError) as caught:
        LLM(tiny_checkpoint, max_num_seqs=value, max_num_batched_tokens=value * 1000)
    assert [problem.where for problem in caught.value.problems] == ["max_num_seqs", "max_num_batched_tokens"]
    for problem in caught.value.problems:
        assert "needs at least" in problem.says and "are free" in problem.says and "use at most" in problem.fix
    most = int(caught.value.problems[0].fix.split()[3].rstrip(";"))
    with LLM(tiny_checkpoint, max_num_seqs=min(most // 2, 2000)) as llm:
        assert len(tokens(llm.generate("the", GREEDY)[0])) == 12


def test_arguments_that_change_nothing_here_are_accepted(tiny_checkpoint):
    with LLM(
        model=str(tiny_checkpoint),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 20,
        max_num_batched_tokens=64,
        tensor_parallel_size=1,
        trust_remote_code=False,
        disable_log_stats=True,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
        assert len(tokens(output)) == 5 and output.outputs[0].text == ""
        with pytest.raises(RequestError, match="there is none"):
            llm.get_tokenizer()
        with pytest.raises(RequestError, match="there is no tokenizer"):
            llm.generate("text")
    with pytest.raises(RequestError, match="is closed"):
        llm.generate([5])
    llm.close()


def test_the_signature_has_vllms_names(llm):
    for method, names in {
        LLM.__init__: "model dtype skip_tokenizer_init enforce_eager max_model_len enable_prefix_caching seed",
        LLM.generate: "prompts sampling_params use_tqdm",
        LLM.chat: "messages sampling_params use_tqdm chat_template add_generation_prompt tools chat_template_kwargs",
    }.items():
        assert set(names.split()) <= set(inspect.signature(method).parameters)


def test_seeds_make_sampling_repeatable(llm, tiny_checkpoint):
    hot = SamplingParams(temperature=2.0, max_tokens=12, seed=11)
    alone = tokens(llm.generate("the", hot)[0])
    beside = llm.generate(["of", "the", "is"], [SamplingParams(temperature=2.0), hot, SamplingParams(temperature=2.0)])
    assert tokens(beside[1]) == alone
    with LLM(tiny_checkpoint, seed=5) as first, LLM(tiny_checkpoint, seed=5) as second:
        unseeded = SamplingParams(temperature=2.0, max_tokens=12)
        assert tokens(first.generate("the", unseeded)[0]) == tokens(second.generate("the", unseeded)[0])
        assert tokens(first.generate("the", unseeded)[0]) != tokens(first.generate("the", unseeded)[0])


def test_logprobs_name_their_tokens(llm):
    (output,) = llm.generate("the capital", dataclasses.replace(GREEDY, logprobs=3, max_tokens=4))
    answer = output.outputs[0]
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entries)) == token and len(entries) == 3
        assert [entry.rank for entry in entries.values()] == [1, 2, 3]
        assert entries[token].decoded_token == llm.get_tokenizer().decode(token)
    assert answer.cumulative_logprob < 0


def test_a_stream_gives_the_parts_of_the_answer(llm):
    (whole,) = llm.generate("the capital", GREEDY)
    parts = list(llm.stream("the capital", GREEDY))
    assert "".join(part.outputs[0].text for part in parts) == whole.outputs[0].text
    assert [token for part in parts for token in tokens(part)] == tokens(whole)
    assert [part.finished for part in parts] == [False] * 11 + [True]


def test_streams_and_calls_may_take_turns(llm):
    (first,), (second,) = (llm.generate(prompt, GREEDY) for prompt in ("the capital", "Paris"))
    shares = {"the capital": [], "Paris": []}
    streams = {prompt: llm.stream(prompt, GREEDY) for prompt in shares}
    for _ in range(12):
        for prompt, stream in streams.items():
            shares[prompt] += tokens(next(stream))
        assert tokens(llm.generate("Paris", GREEDY)[0]) == tokens(second)
    assert shares == {"the capital": tokens(first), "Paris": tokens(second)}


def test_leaving_a_stream_drops_its_request(llm):
    for part in llm.stream("the capital", GREEDY):
        assert llm.llm_engine.has_unfinished_requests() and not part.finished
        break
    stream = llm.stream("the capital", GREEDY)
    next(stream)
    stream.close()
    assert not llm.llm_engine.has_unfinished_requests() and llm.llm_engine.num_free_slots == 4


def test_ctrl_c_aborts_what_runs_and_leaves_the_llm_usable(llm, monkeypatch):
    (expected,) = llm.generate("the", GREEDY)
    step, taken = type(llm.llm_engine).step, []

    def interrupted(self):
        taken.append(1)
        if len(taken) == 4:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(type(llm.llm_engine), "step", interrupted)
    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["the"] * 9, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests() and llm.llm_engine.num_free_slots == 4
    assert tokens(llm.generate("the", GREEDY)[0]) == tokens(expected)


def test_a_failing_step_ends_the_call_and_leaves_the_llm_usable(llm, monkeypatch):
    (expected,) = llm.generate("the", GREEDY)
    other = llm.stream("Paris", GREEDY)
    next(other)
    with monkeypatch.context() as patch:
        patch.setattr(llm.model.module, "compute_logits", lambda hidden: 1 / 0)
        with pytest.raises(PluginError, match="ZeroDivisionError"):
            llm.generate(["the"] * 9, GREEDY)
    assert not llm.llm_engine.has_unfinished_requests()
    with pytest.raises(RequestError, match="1 were dropped"):
        next(other)
    assert tokens(llm.generate("the", GREEDY)[0]) == tokens(expected)


def test_progress_is_shown_only_on_a_terminal(llm, capfd):
    capfd.readouterr()  # what loading has said
    llm.generate(["the", "of"], GREEDY, use_tqdm=True)
    assert capfd.readouterr() == ("", "")


def test_generating_imports_neither_transformers_nor_what_other_uses_need(tiny_checkpoint):
    code = (
        "import sys; from torchplug import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_checkpoint)!r}); print(llm.generate('the', SamplingParams(max_tokens=2))[0].finished)\n"
        "print({'transformers', 'jinja2', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True\nset()\n", 0), done.stderr


@pytest.fixture(scope="module")
def demo(demo_checkpoint):
    with LLM("demo", dtype="float32", max_num_batched_tokens=64) as llm:
        yield llm


QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
]


@pytest.mark.oracle
def test_the_demo_model_answers(demo):
    (answer,) = demo.chat([{"role": "user", "content": QUESTIONS[0]}], SamplingParams(temperature=0, max_tokens=32))
    assert answer.outputs[0].text == "The capital of France is Paris."
    assert (answer.outputs[0].finish_reason, answer.outputs[0].stop_reason) == ("stop", None)


@pytest.mark.oracle
def test_the_demo_model_answers_the_same_alone_in_a_batch_and_in_chunks(demo):
    params = SamplingParams(temperature=0, max_tokens=16)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    together = [tokens(output) for output in demo.chat(chats, params)]
    assert together == [tokens(demo.chat(chat, params)[0]) for chat in chats]
    with LLM("demo", dtype="float32", max_num_batched_tokens=7, max_num_seqs=3) as chunked:
        assert [tokens(output) for output in chunked.chat(chats, params)] == together


def test_prefix_caching_is_on_unless_it_is_switched_off(tiny_checkpoint):
    prompts = ["the capital of France is " * 4] * 2
    params = dataclasses.replace(GREEDY, max_tokens=4)
    answers = []
    for given, hits in ((None, True), (True, True), (False, False)):
        with LLM(tiny_checkpoint, max_model_len=256, enable_prefix_caching=given) as llm:
            for prompt in prompts:
                (output,) = llm.generate(prompt, params)
                answers.append(tokens(output))
            assert bool(output.num_cached_tokens) == hits
            assert bool(llm.metrics().prefix_cache_hit_rate) == hits and llm.metrics().cache_usage == 0
    assert len(set(map(tuple, answers))) == 1


def test_outputs_of_one_prompt_share_its_blocks(tiny_checkpoint):
    """Three outputs of a prompt of 10 blocks hold it once, not three times."""
    several = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=4)
    with LLM(tiny_checkpoint, max_model_len=512, max_num_batched_tokens=512) as llm:
        engine = llm.llm_engine
        size = engine.kv_cache.block_size
        engine.add_request("x", [5 + i % 200 for i in range(10 * size + 3)], several)
        engine.step()
        engine.step()
        assert engine.num_running == 3
        shared = len({block for request in engine._requests.values() for block in request.blocks[0].ids[:10]})
        assert shared == 10


def test_calls_on_several_threads_each_get_their_own_answers(tiny_checkpoint):
    from concurrent.futures import ThreadPoolExecutor

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    prompts = [[{"prompt_token_ids": [5 + index, 7, 9 + call]} for index in range(3)] for call in range(8)]
    with LLM(tiny_checkpoint, dtype="float32", max_num_seqs=4) as llm:

        def answer(prompt):
            return [output.outputs[0].token_ids for output in llm.generate(prompt, params, use_tqdm=False)]

        alone = [answer(prompt) for prompt in prompts]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(answer, prompts)) == alone
