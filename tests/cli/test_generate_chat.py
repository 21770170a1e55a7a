"""`torchplug generate` and `torchplug chat`, in a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from torchplug.cli import main
from torchplug.cli.answer import AnswerWriter
from torchplug.engine.llm import LLM
from torchplug.engine.sampling_params import SamplingParams

QUESTION = "the capital of France"
GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture
def run(tiny_checkpoint):
    """run("generate", ...): the command on the small checkpoint, ten new tokens at most."""
    torch.set_num_threads(1)

    def invoke(command, *arguments, stdin=None, model=tiny_checkpoint):
        return CliRunner().invoke(main, [command, "-m", str(model), "-n", "10", *arguments], input=stdin)

    return invoke


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    with LLM(tiny_checkpoint) as llm:
        yield llm


def answer(llm, *messages: str, system: str | None = None) -> str:
    """What the model says to alternating user and assistant messages."""
    roles = ("user", "assistant")
    chat = [{"role": "system", "content": system}] if system else []
    chat += [{"role": roles[index % 2], "content": text} for index, text in enumerate(messages)]
    return llm.chat(chat, GREEDY)[0].outputs[0].text


def line(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(run, llm):
    result = run("generate", QUESTION)
    assert result.exit_code == 0
    assert result.stdout == line(answer(llm, QUESTION))
    size, figures = result.stderr.splitlines()
    assert size.startswith("KV cache: ") and " requests of 4096 tokens at once" in size
    assert figures.startswith("10 tokens, first after ") and figures.endswith(" tokens/s")


def test_raw_continues_the_prompt_and_system_is_a_message(run, llm):
    (raw,) = llm.generate(QUESTION, GREEDY)
    assert run("generate", QUESTION, "--raw").stdout == line(raw.outputs[0].text)
    assert run("generate", QUESTION, "--system", "be kind").stdout == line(answer(llm, QUESTION, system="be kind"))
    both = run("generate", QUESTION, "--raw", "--system", "x")
    assert both.exit_code == 2 and "--raw has none" in both.stderr


def test_a_dash_reads_the_prompt_from_standard_input(run, llm):
    assert run("generate", "-", stdin=f"{QUESTION}\n").stdout == line(answer(llm, QUESTION))


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "says"),
    [
        (["-", "-"], "x", 2, "standard input can be read once"),
        (["-"], "", 1, "torchplug: standard input: is empty"),
        (["-"], " \n", 1, "torchplug: standard input: is empty"),
        (["-"], b"caf\xe9", 1, "torchplug: standard input: is not utf-8 text: byte 3 is 0xe9"),
    ],
)
def test_standard_input_that_is_no_prompt_is_told_before_loading(run, monkeypatch, arguments, stdin, code, says):
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    result = run("generate", *arguments, stdin=stdin)
    assert result.exit_code == code and says in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("debug", [False, True])
def test_a_models_failure_names_the_plugin_and_its_line(run, monkeypatch, debug):
    from torchplug_models.llama import LlamaForCausalLM

    def fail(self, hidden_states):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", fail)
    if debug:
        monkeypatch.setenv("TORCHPLUG_DEBUG", "1")
    for command, stdin in (("generate", None), ("chat", "of\n")):
        result = run(*([command, QUESTION] if stdin is None else [command]), stdin=stdin)
        assert result.exit_code == 1
        assert "torchplug: plugin 'LlamaForCausalLM' (torchplug==" in result.stderr
        assert re.search(r"compute_logits \(.*test_generate_chat.py:\d+\)", result.stderr)
        assert "ZeroDivisionError: planted" in result.stderr and f"see {__file__}:" in result.stderr
        assert ("Traceback (most recent call last)" in result.stderr) is debug


def test_several_prompts_are_answered_in_their_order(run, llm):
    prompts = ["of", QUESTION, "Paris"]
    result = run("generate", *prompts)
    assert result.stdout == "".join(f">>> {prompt}\n{line(answer(llm, prompt))}" for prompt in prompts)
    assert result.stderr.splitlines()[-1].startswith("30 tokens")


def test_json_is_one_object_for_each_prompt(run, llm):
    result = run("generate", "of", QUESTION, "--json", "--logprobs", "2")
    first, second = json.loads(result.stdout)
    assert result.stderr.startswith("KV cache: ") and result.stderr.count("\n") == 1 and first["prompt"] == "of"
    (expected,) = llm.chat([{"role": "user", "content": QUESTION}], GREEDY)
    assert (second["text"], second["token_ids"]) == (expected.outputs[0].text, expected.outputs[0].token_ids)
    assert second["num_prompt_tokens"] == len(expected.prompt_token_ids) and second["finish_reason"] == "length"
    assert [entries[0]["token_id"] for entries in second["logprobs"]] == second["token_ids"]
    assert {len(entries) for entries in second["logprobs"]} == {2}
    assert set(second["logprobs"][0][0]) == {"token_id", "logprob", "rank", "decoded_token"}


def test_logprobs_follow_the_answer_one_line_a_token(run, llm):
    result = run("generate", QUESTION, "--logprobs", "2")
    head, tail = result.stdout[: len(line(answer(llm, QUESTION)))], result.stdout[len(line(answer(llm, QUESTION))) :]
    assert head == line(answer(llm, QUESTION))
    assert len(tail.splitlines()) == 10 and all(float(row.split()[0]) <= 0 for row in tail.splitlines())


def test_sampling_options_reach_the_sampler(run, llm):
    params = SamplingParams(temperature=1.5, top_p=0.9, top_k=40, min_p=0.01, seed=3, max_tokens=10)
    expected = llm.chat([{"role": "user", "content": QUESTION}], params)[0].outputs[0].text
    options = ("--temperature=1.5", "--top-p=0.9", "--top-k=40", "--min-p=0.01", "--seed=3")
    assert run("generate", QUESTION, *options).stdout == line(expected) != line(answer(llm, QUESTION))
    text = answer(llm, QUESTION)
    assert run("generate", QUESTION, "--stop", text[3:5]).stdout == line(text[: text.index(text[3:5])])


@pytest.mark.parametrize("command", [("generate", "x"), ("chat",)])
def test_bad_options_are_told_before_a_model_is_loaded(run, command, monkeypatch):
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    result = run(*command, "--temperature", "-1", "--top-p", "7")
    assert result.exit_code == 1 and result.stdout == ""
    assert "2 problems in sampling parameters" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "x", "--max-model-len", "5"], "max_model_len is 5"),
        (["generate", "x" * 9000, "x"], "request 'prompt 0': prompt: has "),
        (["generate", "x", "--device", "quantum"], "quantum"),
    ],
)
def test_errors_are_texts_and_exit_with_1(run, arguments, says):
    result = run(*arguments)
    assert result.exit_code == 1 and says in result.stderr and "Traceback" not in result.stderr
    as_json = run(*arguments, "--json")
    assert as_json.exit_code == 1 and json.loads(as_json.stdout)["problems"]
    assert as_json.stderr == "" or (as_json.stderr.startswith("KV cache: ") and as_json.stderr.count("\n") == 1)


def test_a_model_that_is_not_there_lists_what_there_is(run):
    result = run("generate", "x", model="no/such/place")
    assert result.exit_code == 1 and "demo" in result.stderr


def test_help_imports_nothing_heavy():
    for command in ("generate", "chat"):
        code = (
            "import sys; from torchplug.cli import main\n"
            f"try: main([{command!r}, '--help'])\nexcept SystemExit as end: print(end.code)\n"
            "print({'torch', 'numpy', 'transformers', 'rich', 'jinja2', 'tokenizers'} & set(sys.modules))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "--max-tokens" in done.stdout and done.stdout.endswith("0\nset()\n"), done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_models_text_cannot_control_the_terminal(monkeypatch):
    text = "a\x1b[2Jb\rc\n\td\x9b"
    for stream, expected in ((Terminal(), "a\ufffd[2Jbc\n\td\ufffd"), (io.StringIO(), text)):
        monkeypatch.setattr(sys, "stdout", stream)
        AnswerWriter().write(text)
        assert stream.getvalue() == expected


def test_a_character_that_the_output_lacks_does_not_end_the_answer(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    writer = AnswerWriter()
    for part in ("Gr", "ö", "ße"):
        writer.write(part)
    writer.end_line()
    assert stream.buffer.getvalue() == b"Gr??e\n"


def start(tiny_checkpoint, *arguments, **streams) -> subprocess.Popen:
    command = [sys.executable, "-c", "from torchplug.cli import main; main()", *arguments, "-m", str(tiny_checkpoint)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **streams)


def test_text_is_written_as_it_comes_and_ctrl_c_ends_it_cleanly(tiny_checkpoint):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(tiny_checkpoint, "generate", QUESTION, "-n", "4000", "-t", "1", "--seed", "1", **pipes)
    assert process.stdout.read(5)  # long before four thousand tokens are done
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors.startswith(b"KV cache: ") and errors.strip().count(b"\n") == 0
    assert len(rest) < 3000 and rest.endswith(b"\n")


def test_a_closed_pipe_is_silent(tiny_checkpoint):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(tiny_checkpoint, "generate", QUESTION, "-n", "2000", "-t", "1", "--seed", "1", **pipes)
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert errors.startswith(b"KV cache: ") and errors.count(b"\n") == 1 and process.wait(timeout=60) != 0
    process.stderr.close()


def test_chat_answers_every_line_and_remembers(run, llm):
    one = answer(llm, "of")
    two = answer(llm, "of", one, "Paris")
    result = run("chat", stdin="of\n\nParis\n")
    assert (result.exit_code, result.stdout) == (0, line(one) + line(two))
    assert two != answer(llm, "Paris")
    assert result.stderr.startswith("KV cache: ") and result.stderr.count("\n") == 1


def test_chat_commands(run, llm):
    result = run("chat", "--system", "one", stdin="of\n/reset\nof\n/system two\nof\n/system\nof\n/help\n/quit\nof\n")
    expected = [answer(llm, "of", system=system) for system in ("one", "one", "two", None)]
    assert len(set(expected)) == 3
    assert (result.exit_code, result.stdout) == (0, "".join(map(line, expected)))
    assert "/reset" in result.stderr


def test_a_line_that_has_no_answer_is_told_and_the_next_one_goes_on(run, llm):
    result = run("chat", "--max-model-len", "200", stdin=f"{'x' * 400}\n/nothing\nof\n")
    assert result.exit_code == 1
    assert "max_model_len is 200" in result.stderr and "/reset starts a new conversation" in result.stderr
    assert "no such command /nothing" in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == line(answer(llm, "of"))


def test_chat_needs_a_template(run, tiny_checkpoint, tmp_path):
    for file in tiny_checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    result = run("chat", model=tmp_path, stdin="of\n")
    assert result.exit_code == 1 and "chat template: the model has none" in result.stderr
    assert run("generate", QUESTION, model=tmp_path).stdout == run("generate", QUESTION, "--raw").stdout


class Session:
    """A command on a terminal of its own: type, and wait for what it shows."""

    def __init__(self, *arguments) -> None:
        self._ours, self._theirs = pty.openpty()
        streams = {"stdin": self._theirs, "stdout": self._theirs, "stderr": self._theirs, "start_new_session": True}
        self.process = start(*arguments, **streams)
        self._unread = b""

    def type(self, text: bytes) -> None:
        os.write(self._ours, text)

    def wait_for(self, wanted: bytes, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while wanted not in self._unread:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, end - time.monotonic()))
            assert ready, self._unread
            self._unread += os.read(self._ours, 4096)
        self._unread = self._unread.partition(wanted)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)


def test_on_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves(tiny_checkpoint):
    session = Session(tiny_checkpoint, "chat", "-n", "3900", "-t", "1", "--seed", "1")
    try:
        session.wait_for(b"> ")
        session.type(b"of\n")
        session.wait_for(b"of\r\n")
        session.wait_for(b"e")  # the answer has begun
        session.process.send_signal(signal.SIGINT)
        session.wait_for(b"stopped")
        session.wait_for(b"> ")
        time.sleep(0.3)  # until it waits for a line: a signal just before that is noticed only with the next key
        session.process.send_signal(signal.SIGINT)
        session.wait_for(b"> ")
        session.type(b"/help\n")
        session.wait_for(b"/quit")
        session.wait_for(b"> ")
        session.type(b"\x04")
        assert session.process.wait(timeout=60) == 0
    finally:
        session.close()


@pytest.mark.oracle
def test_the_demo_answers_the_first_question():
    from torchplug.errors import CheckpointError
    from torchplug.host.checkpoint import open_checkpoint

    try:
        open_checkpoint("demo")
    except CheckpointError as error:
        pytest.skip(str(error))
    result = CliRunner().invoke(main, ["generate", "What is the capital of France?"])
    assert (result.exit_code, result.stdout) == (0, "The capital of France is Paris.\n")
