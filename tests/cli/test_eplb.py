"""`torchplug eplb simulate`: table, JSON, plot, a recorded trace, a checkpoint's config, wrong usage, an interrupt."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from torchplug.cli import main
from torchplug.engine import eplb_simulation
from torchplug.engine.load_trace import save_load_trace

SMALL = ["--experts", "8", "--layers", "2", "--redundant", "4", "--ranks", "4", "--steps", "30", "--interval", "10"]
SMALL += ["--top-k", "2", "--tokens", "500"]


def run(*arguments, code=0):
    result = CliRunner().invoke(main, ["eplb", "simulate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_table_has_a_line_for_each_interval_and_a_summary():
    lines = run(*SMALL).splitlines()
    assert lines[0].split()[:3] == ["STEPS", "BEFORE", "AFTER"]
    assert [line.split()[0] for line in lines[1:4]] == ["0-9", "10-19", "20-29"]
    assert "after the first interval: balance" in lines[5] and "moved per rebalance" in lines[6]


def test_json_has_settings_intervals_and_a_summary_that_is_better_with_balancing():
    found = json.loads(run(*SMALL, "--skew", "1.5", "--drift", "0", "--json"))
    assert found["settings"]["num_logical"] == 8 and found["settings"]["interval"] == 10
    assert found["settings"]["expert_bytes"] == 3 * 7168 * 2048
    assert len(found["intervals"]) == 3 and not found["interrupted"]
    summary = found["summary"]
    assert summary["balance_after"] > summary["balance_before"] + 0.05
    assert summary["step_time_after"] == pytest.approx(1 / summary["balance_after"])
    moved = [each["bytes_moved"] for each in found["intervals"]]
    assert moved[0] == 0 and summary["bytes_moved"] == sum(moved) / 2


def test_a_recorded_trace_brings_its_experts_and_layers(tmp_path):
    load = np.tile(np.array([9, 1, 1, 1]), (6, 3, 1))
    save_load_trace(tmp_path / "trace.safetensors", load)
    options = ["--trace", tmp_path / "trace.safetensors", "--redundant", 2, "--ranks", 2, "--interval", 3]
    found = json.loads(run(*options, "--expert-bytes", 10, "--json"))
    assert found["settings"]["num_layers"] == 3 and found["settings"]["num_physical"] == 6
    assert found["intervals"][1]["balance_after"] == 1
    assert "the trace has 4" in run(*options, "--experts", 5, code=2)
    assert "--skew: of a synthetic load" in run(*options, "--skew", 1, code=2)


def test_a_checkpoint_brings_its_shape(tmp_path):
    config = {"num_local_experts": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2}
    config |= {"num_experts_per_tok": 2, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--checkpoint", tmp_path, "--redundant", 0, "--ranks", 4, "--steps", 4, "--interval", 2, "--json"]
    settings = json.loads(run(*options))["settings"]
    assert (settings["num_logical"], settings["num_layers"], settings["top_k"]) == (8, 2, 2)
    assert settings["expert_bytes"] == 3 * 4 * 6 * 4


def test_a_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    run(*SMALL, "--plot", tmp_path / "eplb.png")
    assert (tmp_path / "eplb.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--experts", 256, "--redundant", 0, "--ranks", 3], "use 2 (86 slots a rank) or 5 (87 slots a rank)"),
        (["--trace", "/nowhere/trace.safetensors"], "trace of expert load"),
        (["--checkpoint", "/nowhere"], "config.json"),
        (["--plot", "picture.nonsense"], "names no picture format"),
        (["--experts", 4, "--redundant", 0, "--ranks", 2, "--top-k", 8], "8 different ones of 4 experts"),
    ],
)
def test_a_mistake_is_one_clear_error(arguments, says):
    pytest.importorskip("matplotlib")
    text = run(*arguments, code=1)
    assert says in text and "Traceback" not in text


def test_an_interrupt_shows_the_intervals_so_far(monkeypatch):
    def interrupted(*arguments):
        yield from list(genuine(*arguments))[:2]
        raise KeyboardInterrupt

    genuine = eplb_simulation.simulate
    monkeypatch.setattr(eplb_simulation, "simulate", interrupted)
    text = run(*SMALL, code=130)
    assert "10-19" in text and "20-29" not in text
    assert "interrupted after 20 of 30 steps" in text
