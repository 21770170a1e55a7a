"""torchplug-trace as a wheel beside others: every hook call of any model, and nothing where it is switched off."""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from torchplug.hookspecs import HOOKS, Phase

pytestmark = pytest.mark.packaging

SAMPLES = Path(__file__).parents[2] / "sample_plugins"
README = (SAMPLES / "torchplug-trace" / "README.md").read_text()
OFF = "*,-torchplug-trace"

CASES = f"""
import sys, tempfile
sys.path.insert(0, {str(SAMPLES / "torchplug-tour" / "tests")!r})
from pathlib import Path
from hook_cases import ARCHITECTURE, CASES, Tour, write_checkpoint
"""

PROGRAM = f"""{CASES}
from torchplug.hookspecs import HOOKS, Phase

with tempfile.TemporaryDirectory() as folder:
    tour = Tour(write_checkpoint(Path(folder)), "cpu")
for name, case in CASES.items():
    arguments, keywords = case.arguments(tour)
    getattr(tour.model.hooks, name)(*arguments, **keywords)
    if HOOKS[name].phase is Phase.CLASS:
        getattr(tour.host.model_class(ARCHITECTURE).hooks, name)(*arguments, **keywords)
print("torchplug_trace" in sys.modules)
"""
"""Calls every hook of the tour once, the class-phase ones on the class too, and says whether the trace was imported."""


@pytest.fixture(scope="module")
def traced(with_samples):
    return with_samples("torchplug-tour", "torchplug-trace")


def test_a_line_of_json_for_every_hook_of_the_table(traced):
    done = traced.run("-c", PROGRAM, TORCHPLUG_TRACE="json")
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.stdout == "True\n"
    expected = [name for name, hook in HOOKS.items() for _ in range(2 if hook.phase is Phase.CLASS else 1)]
    assert sorted(record["hook"] for record in records) == sorted(expected)
    for record in records:
        assert record["model"] == "TourForCausalLM" and record["us"] > 0
        assert list(record["arguments"]) == list(HOOKS[record["hook"]].arguments)
    (embed,) = [record for record in records if record["hook"] == "embed_input_ids"]
    assert embed["result"] == {"dtype": "float32", "shape": [4, 8], "device": "cpu"}


def test_text_lines_by_default_and_on_stderr_alone(traced):
    done = traced.run("-c", PROGRAM)
    assert done.stdout == "True\n"
    lines = done.stderr.splitlines()
    for name in HOOKS:
        assert any(
            re.match(rf"torchplug-trace: TourForCausalLM\.{name}\(.*\) -> .*  \[\d+\.\d us\]$", x) for x in lines
        )


def test_a_model_that_generates_shows_its_embedding_once_per_step(traced):
    """The tour keeps no cache, so that each step embeds the whole prefix."""
    generate = f"""{CASES}
from torchplug import LLM, SamplingParams

with tempfile.TemporaryDirectory() as folder:
    llm = LLM(str(write_checkpoint(Path(folder))), skip_tokenizer_init=True, use_tqdm_on_load=False)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
llm.generate([{{"prompt_token_ids": [1, 2]}}], params, use_tqdm=False)
"""
    done = traced.run("-c", generate, TORCHPLUG_TRACE="json")
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert [record["hook"] for record in records] == ["embed_input_ids"] * 3
    assert [record["arguments"]["input_ids"]["shape"] for record in records] == [[2], [3], [4]]


def test_switched_off_by_the_selection_it_is_not_even_imported(traced):
    done = traced.run("-c", PROGRAM, TORCHPLUG_PLUGINS=OFF)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_other_commands_are_as_without_it(traced):
    """Nothing is printed where no hook is called."""
    told = traced.torchplug("list")
    assert "TourForCausalLM" in told.stdout and told.stderr == ""
    told = traced.torchplug("doctor")
    assert "No problem found" in told.stdout and "torchplug-trace==0.1.0" in told.stdout and told.stderr == ""


def test_what_its_readme_shows_is_what_happens(traced, tmp_path):
    """The Python blocks run on a checkpoint of the tour; their lines are those of the readme but for the time."""
    tour_tests = str(SAMPLES / "torchplug-tour" / "tests")
    make = f"import sys, pathlib; sys.path.insert(0, {tour_tests!r})\nimport hook_cases\n"
    traced.python(make + f"hook_cases.write_checkpoint(pathlib.Path({str(tmp_path)!r}))")
    blocks = re.findall(r"```(\w+)\n(.*?)```", README.replace("path/to/tour", str(tmp_path)), re.DOTALL)
    first, alone = [text for kind, text in blocks if kind == "python"]
    (shown,) = [text for kind, text in blocks if kind == "text"]
    assert untimed(traced.run("-c", first).stderr) == untimed(shown)
    (example,) = [json.loads(text) for kind, text in blocks if kind == "json"]
    last = json.loads(traced.run("-c", first, TORCHPLUG_TRACE="json").stderr.splitlines()[-1])
    assert last | {"us": 0} == example | {"us": 0}
    (export,) = re.findall(r"^\$ export (.*)$", README, re.MULTILINE)
    variable, _, value = shlex.split(export)[0].partition("=")
    assert (variable, value) == ("TORCHPLUG_PLUGINS", OFF)
    done = traced.run("-c", alone + "\nprint(*lines, end='')", TORCHPLUG_PLUGINS=value)
    assert json.loads(done.stdout)["hook"] == "get_language_model" and done.stderr == ""


def untimed(text):
    return re.sub(r"\d+\.\d us", "? us", text)


def test_the_wheel_is_the_plugin_alone(sample):
    names = {PurePosixPath(name) for name in zipfile.ZipFile(sample("torchplug-trace").wheel).namelist()}
    code = {name for name in names if not name.parts[0].endswith(".dist-info")}
    assert code == {PurePosixPath("torchplug_trace", name) for name in ("__init__.py", "shapes.py", "tracing.py")}
