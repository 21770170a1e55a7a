"""`torchplug bench`: the figures are those of the rounds, and an interrupt loses none that was complete."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch
from click.testing import CliRunner
from torchplug.cli import bench, main
from torchplug.engine.llm import LLM


@pytest.fixture
def run(tiny_checkpoint):
    torch.set_num_threads(1)

    def invoke(*arguments):
        return CliRunner().invoke(main, ["bench", arguments[0], "-m", str(tiny_checkpoint), *map(str, arguments[1:])])

    return invoke


SHORT = ("--input-len", 20, "--output-len", 5, "--rounds", 3, "--warmup", 1)


def test_throughput(run, monkeypatch):
    asked = []
    generate = LLM.generate

    def noted(self, prompts, params, **others):
        asked.append(([tuple(each["prompt_token_ids"]) for each in prompts], params))
        return generate(self, prompts, params, **others)

    monkeypatch.setattr(LLM, "generate", noted)
    result = run("throughput", *SHORT, "--num-prompts", 6, "--max-num-seqs", 4, "--json", "--dtype", "float32")
    assert result.exit_code == 0 and result.stderr.startswith("KV cache: ") and result.stderr.count("\n") == 1
    found = json.loads(result.stdout)
    assert found["benchmark"] == "throughput" and not found["interrupted"] and len(found["rounds"]) == 3
    for each in found["rounds"]:
        assert each["output tokens"] == pytest.approx(6 * 5 / each["time"])
        assert each["all tokens"] == pytest.approx(6 * 25 / each["time"])
        assert each["requests"] == pytest.approx(6 / each["time"])
    times = [each["time"] for each in found["rounds"]]
    assert found["summary"]["time"] == {"median": statistics.median(times), "min": min(times), "max": max(times)}
    settings = found["settings"]
    assert (settings["dtype"], settings["device"], settings["num_prompts"], settings["max_num_seqs"]) == (
        "float32",
        "cpu",
        6,
        4,
    )
    assert (settings["num_blocks"], settings["block_size"], settings["max_tokens"]) == (4 * 2, 16, 25)
    assert settings["concurrency"] == 4.0 and settings["kv_cache_bytes"] > 0
    assert found["machine"]["torch"] == torch.__version__
    # The warm-up and every round have prompts of their own: no cache may know them.
    prompts = [prompt for each, _ in asked for prompt in each]
    assert len(asked) == 4 and len(set(prompts)) == 24 and {len(prompt) for prompt in prompts} == {20}
    assert all((p.max_tokens, p.ignore_eos, p.temperature) == (5, True, 0.0) for _, p in asked)


def test_prompts_may_share_a_beginning(run, monkeypatch):
    cached = []
    timed = bench._timed

    def noted(*arguments):
        seconds, outputs = timed(*arguments)
        cached.append(sum(output.num_cached_tokens or 0 for output in outputs))
        return seconds, outputs

    monkeypatch.setattr(bench, "_timed", noted)
    long = ("--input-len", 40, "--output-len", 2, "--num-prompts", 4, "--rounds", 2, "--warmup", 0)
    for more, expected in (
        (("--shared-len", 32), [3 * 32] * 2),
        ((), [0] * 2),
        (("--shared-len", 32, "--no-prefix-caching"), [0] * 2),
    ):
        cached.clear()
        assert run("throughput", *long, *more).exit_code == 0
        assert cached == expected
    assert run("throughput", "--input-len", 4, "--shared-len", 5).exit_code == 2


def test_latency_adds_up(run):
    result = run("latency", *SHORT, "--batch", 2, "--json")
    found = json.loads(result.stdout)
    assert len(found["rounds"]) == 3
    for each in found["rounds"]:
        assert 0 < each["time to first token"] < 1000 * each["time"]
        assert each["decode"] == pytest.approx(2 * 1000 / each["time per token"])
        whole = each["time to first token"] + 4 * each["time per token"]
        assert whole <= 1000 * each["time"] * 1.01
    assert run("latency", "--output-len", 1).exit_code == 2


def test_the_table_has_a_line_for_each_figure(run):
    lines = run("latency", *SHORT).stdout.splitlines()
    assert lines[0].split()[:3] == ["LATENCY,", "3", "ROUNDS"]
    assert [line.rsplit("  ", 1)[-1].strip() for line in lines[1:]] == ["s", "ms", "ms", "tokens/s"]


def test_startup_is_a_fresh_process_from_its_creation(run):
    result = run("startup", "--rounds", 2, "--warmup", 0, "--json", "--block-size", 4, "--kv-cache-gib", 1)
    assert result.stderr.startswith("KV cache: ") and result.stderr.count("\n") == 1
    found = json.loads(result.stdout)
    assert (found["settings"]["block_size"], found["settings"]["num_blocks"]) == (4, 5)
    for each in found["rounds"]:
        parts = each["python"] + each["import"] + each["load"] + each["answer"]
        assert each["first token"] == pytest.approx(parts) and min(each.values()) > 0 and each["import"] > 0.2


def test_startup_passes_an_error_on(run):
    result = run("startup", "--device", "cuda:77")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("torchplug: ") and "cuda:77" in result.stderr and "Traceback" not in result.stderr


def test_a_plot_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    for ending in ("png", "svg"):
        assert run("latency", *SHORT, "--plot", tmp_path / f"x.{ending}").exit_code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "x.svg").read_text()
    assert "<svg" in drawn and len(drawn) > 5000


def test_a_plot_that_cannot_be_drawn_is_told_before_anything_runs(run, tmp_path, monkeypatch):
    monkeypatch.setattr(LLM, "__init__", lambda *_, **__: pytest.fail("a model was loaded"))
    if importlib.util.find_spec("matplotlib"):
        assert "names no picture format" in run("latency", "--plot", tmp_path / "x.docx").stderr
        assert "cannot be written to" in run("throughput", "--plot", tmp_path / "missing" / "x.png").stderr
    monkeypatch.setattr("torchplug.cli.bench_report.find_spec", lambda name: None)
    for name in ("latency", "throughput", "startup"):
        result = run(name, "--plot", tmp_path / "x.png")
        assert result.exit_code == 1
        assert result.stderr.endswith('not installed\n  fix: pip install "torchplug[plot]", or leave out --plot\n')


def test_an_interrupt_shows_the_rounds_before_it(run, monkeypatch):
    timed, rounds = bench._timed, []

    def interrupted(*arguments):
        rounds.append(1)
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(bench, "_timed", interrupted)
    result = run("latency", *SHORT, "--json")
    assert result.exit_code == 130 and result.stderr.rstrip().endswith("\ninterrupted after 2 of 3 rounds")
    found = json.loads(result.stdout)
    assert found["interrupted"] and len(found["rounds"]) == 2
    rounds[:] = [1, 1, 1]
    result = run("throughput", *SHORT)
    assert result.exit_code == 130 and result.stdout == ""
    assert result.stderr.rstrip().endswith("\ninterrupted before the first round was complete")


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT")
def test_ctrl_c_of_a_real_run(tiny_checkpoint):
    command = [sys.executable, "-m", "torchplug", "bench", "latency", "-m", str(tiny_checkpoint), "--rounds", "100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--output-len", "3"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    time.sleep(12)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert shown.startswith("LATENCY, ") and "interrupted after" in errors
