"""`torchplug generate --input --output`: every line has exactly one record, whatever happens in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from torchplug.cli import main
from torchplug.cli.batch_file import BatchFile
from torchplug.engine.llm import LLM
from torchplug.engine.llm_engine import LLMEngine
from torchplug.engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=10)


@pytest.fixture
def files(tmp_path):
    return tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"


@pytest.fixture
def run(tiny_checkpoint, files):
    torch.set_num_threads(1)

    def invoke(*arguments):
        options = ["generate", "-m", str(tiny_checkpoint), "-n", "10", "--input", files[0], "--output", files[1]]
        return CliRunner().invoke(main, [*map(str, options), *arguments])

    return invoke


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    with LLM(tiny_checkpoint) as llm:
        yield llm


def write(path, lines) -> None:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def records(path) -> dict[int, dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    by_line = {record["line"]: record for record in found}
    assert len(by_line) == len(found), "a line has two records"
    return by_line


def test_each_form_of_line_has_its_answer(run, files, llm):
    messages = [{"role": "user", "content": "of"}]
    ids = llm.get_tokenizer().encode("the capital")
    write(
        files[0],
        [
            {"prompt": "the capital"},
            {"messages": messages, "id": "chat"},
            "",
            {"prompt_token_ids": ids, "id": 7, "sampling_params": {"max_tokens": 3}},
            {"prompt": "é", "sampling_params": {"n": 2, "temperature": 1.0, "seed": 3, "logprobs": 1}},
            {"prompt": "x", "sampling_params": {"structured_outputs": {"choice": ["ab", "ba"]}}},
        ],
    )
    result = run()
    assert (result.exit_code, result.stdout) == (0, "") and result.stderr.startswith("KV cache: ")
    assert result.stderr.endswith("\n5 of 5 lines are done\n")
    found = records(files[1])
    assert set(found) == {1, 2, 4, 5, 6}
    (plain,) = llm.generate("the capital", GREEDY)
    assert found[1]["outputs"] == [
        {
            "index": 0,
            "text": plain.outputs[0].text,
            "token_ids": plain.outputs[0].token_ids,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert found[1]["num_prompt_tokens"] == len(ids) and "id" not in found[1]
    assert found[2]["id"] == "chat" and found[2]["outputs"][0]["text"] == llm.chat(messages, GREEDY)[0].outputs[0].text
    assert found[4]["id"] == 7 and found[4]["outputs"][0]["token_ids"] == plain.outputs[0].token_ids[:3]
    assert [one["index"] for one in found[5]["outputs"]] == [0, 1] and len(found[5]["outputs"][0]["logprobs"]) == 10
    assert found[6]["outputs"][0]["text"] in ("ab", "ba")


BAD = [
    ("{", "is not JSON"),
    ("[1]", "expected a JSON object, got list"),
    ("[" * 100_000, "is not JSON"),
    ({"prompt": "a", "promt": "b"}, "promt: no such key"),
    ({"id": 3}, "expected exactly one of prompt, messages, prompt_token_ids, got none"),
    ({"prompt": "a", "messages": []}, "got prompt and messages"),
    ({"prompt": ""}, "has no tokens"),
    ({"prompt": 3}, "expected a text"),
    ({"prompt": "\ud800"}, "half of a surrogate pair"),
    ({"prompt_token_ids": [99999]}, "outside the vocabulary"),
    ({"prompt_token_ids": "abc"}, "expected a list of integers"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "no tools here"),
    ({"prompt": "a", "sampling_params": [1]}, "sampling_params: expected an object"),
    ({"prompt": "a", "sampling_params": {"self": 1}}, "self: no such sampling parameter"),
    ({"prompt": "a", "sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
    ({"prompt": "a", "sampling_params": {"structured_outputs": {"regex": "(["}}}, "unclosed character class"),
    ({"prompt": "a", "sampling_params": {"structured_outputs": {"regexx": "a"}}}, "regexx: no such argument"),
]


def test_a_bad_line_has_its_error_and_disturbs_no_other(run, files):
    good = {"prompt": "the capital"}
    write(files[0], [line for bad, _ in BAD for line in (good, bad)] + [good])
    result = run()
    assert result.exit_code == 1 and f"{len(BAD)} have an error instead of an answer: line 2, 4" in result.stderr
    assert "Traceback" not in result.stderr
    found = records(files[1])
    assert set(found) == set(range(1, 2 * len(BAD) + 2))
    for index, (_, says) in enumerate(BAD):
        error = found[2 * index + 2]["error"]
        text = " ".join(f"{each['where']}: {each['says']} {each['fix']}" for each in error["problems"])
        assert says in text or says in text.removeprefix(": "), (says, error)
    answers = {json.dumps(found[number]["outputs"]) for number in range(1, 2 * len(BAD) + 2, 2)}
    assert len(answers) == 1


def test_a_finished_file_is_left_as_it_is_and_loads_no_model(run, files, monkeypatch):
    write(files[0], [{"prompt": "a"}, {"prompt": "b"}])
    assert run().exit_code == 0
    before = files[1].read_bytes()
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    result = run()
    assert result.exit_code == 0 and result.stderr == "2 of 2 lines are done, 2 of them before this run\n"
    assert files[1].read_bytes() == before


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_cut_record_is_dropped_and_its_line_asked_again(run, files, cut):
    write(files[0], [{"prompt": text} for text in ("the", "of", "is")])
    run()
    whole = files[1].read_bytes()
    lines = whole.splitlines(keepends=True)
    files[1].write_bytes(lines[0] + lines[1][:cut])
    result = run()
    assert result.stderr.endswith("\n3 of 3 lines are done, 1 of them before this run\n")
    assert sorted(files[1].read_bytes().splitlines()) == sorted(whole.splitlines())


def test_answers_of_something_else_are_refused_and_kept(run, files):
    write(files[0], [{"prompt": "the"}, {"prompt": "of"}])
    run()
    before = files[1].read_bytes()
    write(files[0], [{"prompt": "the"}, {"prompt": "another"}])
    assert "line 2 of" in run().stderr
    write(files[0], [{"prompt": "the"}])
    assert "answers line 2, which" in run().stderr
    write(files[0], [{"prompt": "the"}, {"prompt": "of"}])
    assert "with other parameters" in run("--temperature", "0.5").stderr
    assert files[1].read_bytes() == before
    files[1].write_text("my thesis\n")
    result = run()
    assert result.exit_code == 1 and "line 1 is no record of a batch" in result.stderr
    assert files[1].read_text() == "my thesis\n"


def test_usage(run, files, tiny_checkpoint):
    write(files[0], [{"prompt": "the"}])
    for arguments, says in {("x",): "--input takes no PROMPT", ("--raw",): "--input takes no", ("--json",): ""}.items():
        result = run(*arguments)
        assert result.exit_code == 2 and says in result.stderr
    only = CliRunner().invoke(main, ["generate", "--input", str(files[0])])
    assert only.exit_code == 2 and "go together" in only.stderr
    none = CliRunner().invoke(main, ["generate"])
    assert none.exit_code == 2 and "Missing argument" in none.stderr
    bad = run("--top-p", "7")
    assert bad.exit_code == 1 and not files[1].exists()
    same = CliRunner().invoke(main, ["generate", "--input", str(files[0]), "--output", str(files[0])])
    assert same.exit_code in (1, 2) and files[0].read_text() == '{"prompt": "the"}\n'
    nowhere = str(files[1].parent / "missing" / "x")
    result = CliRunner().invoke(main, ["generate", "--input", str(files[0]), "--output", nowhere])
    assert result.exit_code == 1 and "cannot be written: No such file" in result.stderr


def test_two_runs_do_not_write_one_file(files):
    write(files[0], [{"prompt": "the"}])
    with BatchFile(*files, defaults={}, model="m").open():
        other = "from pathlib import Path; from torchplug.cli.batch_file import BatchFile; import sys\n"
        other += "with BatchFile(Path(sys.argv[1]), Path(sys.argv[2]), defaults={}, model='m').open(): pass"
        done = subprocess.run([sys.executable, "-c", other, *map(str, files)], capture_output=True, text=True)
    assert done.returncode == 1 and "is being written by another run" in done.stderr


def test_many_lines_are_in_flight_at_once_but_not_all(run, files, monkeypatch):
    write(files[0], [{"prompt": "the capital"}] * 300)
    most = 0
    step = LLMEngine.step

    def counted(self):
        nonlocal most
        most = max(most, self.get_num_unfinished_requests())
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", counted)
    assert run("-n", "2").exit_code == 0
    assert most == 128 and len(records(files[1])) == 300


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_run_goes_on_without_repeating_or_losing_a_line(tiny_checkpoint, files, tmp_path):
    total = 600
    lines = [
        {"prompt": f"the capital {number}", "sampling_params": {"max_tokens": 1 + number % 40}}
        for number in range(total)
    ]
    lines[17] = {"prompt": ""}
    write(files[0], lines)

    def command(target):
        options = ["-m", str(tiny_checkpoint), "-n", "10", "--input", str(files[0]), "--output", str(target)]
        return [sys.executable, "-m", "torchplug", "generate", *options]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    kills = 0
    for wanted in (40, 200, 420):
        process = subprocess.Popen(command(files[1]), env=environment, stderr=subprocess.PIPE)
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            if files[1].exists() and files[1].read_bytes().count(b"\n") >= wanted:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(0.002)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        with files[1].open("ab") as file:
            file.write(b'{"line": 599, "outp')  # as if the kill had come in the middle of a write
    assert kills >= 2
    done = subprocess.run(command(files[1]), env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and f"{total} of {total} lines are done" in done.stderr and "line 18" in done.stderr
    found = records(files[1])
    assert set(found) == set(range(1, total + 1))
    assert all(len(found[n + 1]["outputs"][0]["token_ids"]) == 1 + n % 40 for n in range(total) if n != 17)
    subprocess.run(command(tmp_path / "whole.jsonl"), env=environment, capture_output=True, timeout=240)
    assert records(tmp_path / "whole.jsonl") == found


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT")
def test_ctrl_c_says_how_far_it_came(tiny_checkpoint, files):
    write(files[0], [{"prompt": "the", "sampling_params": {"max_tokens": 300}}] * 400)
    options = ["-m", str(tiny_checkpoint), "--input", str(files[0]), "--output", str(files[1])]
    command = [sys.executable, "-m", "torchplug", "generate", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    while not (files[1].exists() and files[1].read_bytes().count(b"\n")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "of 400 lines are done; the same command goes on from here" in errors
    assert "Traceback" not in errors and files[1].read_bytes().endswith(b"\n")


def test_a_step_that_fails_costs_its_own_lines_and_two_in_a_row_end_the_run(run, files, monkeypatch):
    from torchplug.engine.llm_engine import LLMEngine
    from torchplug.errors import PluginError, Problem

    run_step = LLMEngine.step
    steps = []

    def step(self, at):
        steps.append(1)
        if len(steps) in at:
            self.abort_request([name for name, each in list(self._requests.items()) if each.slot is not None])
            raise PluginError("plugin 'Test'", Problem("forward", "planted"))
        return run_step(self)

    write(files[0], [{"prompt": "the", "sampling_params": {"max_tokens": 3}} for _ in range(40)])
    monkeypatch.setattr(LLMEngine, "step", lambda self: step(self, {2}))
    result = run()
    found = records(files[1])
    failed = [line for line, record in found.items() if "error" in record]
    assert result.exit_code == 1 and len(found) == 40 and "40 of 40 lines are done" in result.stderr
    assert failed == list(range(1, 33)) and found[1]["error"]["problems"][0]["says"] == "planted"
    files[1].unlink()
    steps.clear()
    monkeypatch.setattr(LLMEngine, "step", lambda self: step(self, range(2, 99)))
    result = run()
    assert result.exit_code == 1 and "torchplug: plugin 'Test': forward: planted" in result.stderr
    assert len(records(files[1])) == 32
    monkeypatch.setattr(LLMEngine, "step", run_step)
    assert "40 of 40 lines are done, 32 of them before this run" in run().stderr
