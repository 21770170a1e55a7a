"""`torchplug doctor --deep`: every plugin imported in a process of its own, and nothing of it reaches this one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from torchplug.cli import main
from torchplug.host import import_trials
from torchplug.host.catalogue import Catalogue
from torchplug.host.import_trials import run_trials

MODEL = """
import torch
from torch import nn


class {name}(nn.Module):
    {flag}

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    def embed_input_ids(self, input_ids):
        return input_ids

    def get_mrope_input_positions(self, input_tokens, mm_features):
        return None

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return input_ids

    def compute_logits(self, hidden_states):
        return hidden_states

    def load_weights(self, weights):
        return set()
"""
WRAPPER = """
from torchplug import hookimpl


@hookimpl(wrapper=True)
def embed_input_ids():
    return (yield)
"""


@pytest.fixture
def site(request):
    """A directory of distributions beside everything that is installed: a child must find torch and torchplug."""
    installed = list(sys.path)
    make_site = request.getfixturevalue("make_site")
    site = make_site()
    sys.path.extend(path for path in installed if path not in sys.path)
    return site


def offer(site, name, source, *, wrapper=False, version="1.0"):
    if wrapper:
        site.add(name, version, wrappers={name: name}, modules=False)
    else:
        site.add(name, version, models={name.title(): f"{name}:{name.title()}"}, modules=False)
    site.module(name, source)


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments])


def deep(*names, code):
    """JSON of one deep run over the named distributions."""
    result = run("--deep", "--json", "--plugins", ",".join(names))
    assert result.exit_code == code, result.output
    told = json.loads(result.stdout)
    return told, {each.get("architecture") or each["wrapper"]: each for each in told["imports"]}


def trials(*names, **options):
    rows = (row for row in Catalogue(selection=",".join(names)).rows() if row.distribution in names)
    return run_trials(sorted(rows, key=lambda row: names.index(row.distribution)), **options)


def test_without_deep_nothing_is_imported(site):
    offer(site, "loud", "raise SystemExit('imported')\nclass Loud: ...")
    result = run("--plugins", "loud")
    assert result.exit_code == 0 and "loud" not in sys.modules
    assert "IMPORTED" not in result.stdout and "\nimported " not in result.stdout
    assert json.loads(run("--plugins", "loud", "--json").stdout)["imports"] is None
    result = run("--timeout", "3")
    assert result.exit_code == 2 and "--timeout is of use with --deep only" in result.stderr


def test_table_json_and_bug_report_tell_time_offers_and_result(site):
    offer(site, "good", MODEL.format(name="Good", flag="supports_mrope = True"), version="2.1")
    offer(site, "watch", WRAPPER, wrapper=True)
    offer(site, "bad", MODEL.format(name="Bad", flag="supports_mrope = 1"))
    result = run("--deep", "--plugins", "good,watch,bad")
    assert result.exit_code == 1 and not {"good", "watch", "bad"} & set(sys.modules)
    table = [re.split(r"\s{2,}", line) for line in result.stdout.splitlines()]
    head = table.index(["IMPORTED", "DISTRIBUTION", "VERSION", "TIME", "OF IT TORCH", "RESULT", "OFFERS"])
    bad, good, watch = table[head + 1 : head + 4]
    assert (good[0], good[1], good[2], good[5], good[6]) == ("Good", "good", "2.1", "ok", "SupportsMRoPE")
    assert re.fullmatch(r"\d+\.\d\d s", good[3]) and re.fullmatch(r"\d+\.\d\d s", good[4])
    assert (bad[0], bad[5], bad[6]) == ("Bad", "refused", "-")
    assert (watch[0], watch[4], watch[5], watch[6]) == ("watch", "-", "ok", "embed_input_ids")
    assert "torchplug: the installed plugins: Bad of bad==1.0: supports_mrope (class Bad, bad.py:6): " in result.stdout
    _, block, _ = result.stdout.split("-" * 72 + "\n")
    assert re.search(r"^imported Good \[good\] \d+\.\d\d s, torch \d+\.\d\d s: ok$", block, re.MULTILINE)
    assert re.search(r"^imported watch \[watch\] \d+\.\d\d s: ok$", block, re.MULTILINE)
    assert re.search(r"^problem contract: Bad of bad==1.0: supports_mrope ", block, re.MULTILINE)


def test_warnings_of_the_class_are_told_and_do_not_fail(site):
    offer(site, "spare", MODEL.format(name="Spare", flag="pass"))
    told, imports = deep("spare", code=0)
    (warning,) = told["warnings"]
    assert warning["kind"] == "class" and warning["says"] == "nobody calls it: Spare does not claim SupportsMRoPE"
    assert warning["where"].startswith("Spare of spare==1.0: get_mrope_input_positions (spare.py:")
    assert imports["Spare"]["result"] == "ok, warnings" and imports["Spare"]["problems"] == []
    result = run("--deep", "--plugins", "spare")
    assert f"warning: {warning['where']}: {warning['says']}\n  fix: {warning['fix']}\n" in result.stdout
    assert "warning class: Spare of spare==1.0" in result.stdout.split("-" * 72)[1]


EFFECTS = (
    """
import os, subprocess, sys, threading, time, _thread

print("one")
sys.stderr.write("two\\n")
os.write(1, b"three\\n")
subprocess.run([sys.executable, "-c", "print('four')"])
os.environ["PLANTED"] = "secret value"
os.environ.pop("PLANTED_BEFORE", None)
threading.Thread(target=print, args=("five",), name="short").start()
lock = _thread.allocate_lock()
lock.acquire()
_thread.start_new_thread(lambda: lock.acquire(), ())
time.sleep(0.2)
"""
    + WRAPPER
)


def test_what_an_import_does_besides_is_told_and_does_not_reach_this_process(site, monkeypatch, capfd):
    monkeypatch.setenv("PLANTED_BEFORE", "x")
    offer(site, "busy", EFFECTS, wrapper=True)
    (trial,) = trials("busy")
    assert set(trial.output.split()) == {"one", "two", "three", "four", "five"}
    assert trial.environment == ("PLANTED", "PLANTED_BEFORE") and "secret value" not in repr(trial)
    assert trial.threads == (f"short ({site.root}/busy.py:10)", "a thread without a name")
    assert trial.torch_seconds is None and trial.devices == () and trial.problems == ()
    assert trial.offers == ("embed_input_ids",)
    assert "PLANTED" not in os.environ and os.environ["PLANTED_BEFORE"] == "x"
    assert capfd.readouterr() == ("", "")
    told, imports = deep("busy", code=0)
    assert imports["busy"]["result"] == "ok, prints, threads, environment"
    words = [each["says"].split()[0] for each in told["warnings"]]
    assert words == ["prints", "starts", "starts", "changes"]


def test_torchs_own_effects_are_not_the_plugins(site):
    offer(site, "plain", MODEL.format(name="Plain", flag="supports_mrope = True"))
    (trial,) = trials("plain")
    assert trial.torch_seconds is not None and trial.torch_seconds <= trial.seconds
    assert (trial.output, trial.threads, trial.environment, trial.devices) == ("", (), (), ())
    assert list(trial.side_effects()) == []


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os\nos.kill(os.getpid(), 11)", "ends the process: signal SIGSEGV"),
        ("import os\nos.write(2, b'first\\nlast words\\n')\nos._exit(3)", "ends the process: exit code 3 (last words)"),
        ("import os\nos._exit(0)", "ends the process: exit code 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise SystemExit(0)", "tries to end the process: SystemExit(0)"),
    ],
)
def test_an_import_that_ends_its_process_is_a_problem_of_that_plugin(site, source, says):
    offer(site, "fatal", source)
    (trial,) = trials("fatal")
    (problem,) = trial.problems
    assert trial.kind == "import" and problem.says == says and "`pip uninstall fatal`" in problem.fix
    assert problem.where.startswith("import of fatal")


def test_a_class_that_ends_the_process_when_it_is_looked_at_is_a_problem_too(site):
    meta = "class Meta(type):\n    @property\n    def __mro__(self): raise KeyboardInterrupt\n"
    source = meta + "class Odd(metaclass=Meta): ..."
    offer(site, "odd", source)
    (trial,) = trials("odd")
    assert [problem.says for problem in trial.problems] == ["KeyboardInterrupt"]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


STARTS_ANOTHER = """
import pathlib, subprocess, sys, time

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
pathlib.Path({note!r}).write_text(str(child.pid))
{then}
"""


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at /proc")
@pytest.mark.parametrize("then", ["time.sleep(120)", "class Parent: ..."])
def test_what_an_import_starts_ends_with_it(site, tmp_path, then):
    note = tmp_path / "pid"
    offer(site, "parent", STARTS_ANOTHER.format(note=str(note), then=then))
    (trial,) = trials("parent", timeout=8.0)
    assert trial.kind == ("timeout" if "sleep" in then else "contract")
    if trial.kind == "timeout":
        assert trial.problems[0].says == "does not end within 8 seconds"
        assert trial.problems[0].fix.startswith(
            "give it more time with --timeout, or install another version of parent"
        )
    deadline = time.monotonic() + 5
    while alive(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(note.read_text()))


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks at /proc")
def test_ctrl_c_ends_every_import_and_exits_with_130(site, make_site, tmp_path):
    note = tmp_path / "pid"
    offer(site, "parent", STARTS_ANOTHER.format(note=str(note), then="time.sleep(120)"))
    command = [sys.executable, "-m", "torchplug", "doctor", "--deep", "--plugins", "parent"]
    environment = {**os.environ, "PYTHONPATH": make_site.pythonpath()}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (130, "") and "Traceback" not in stderr
    while alive(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(int(note.read_text()))


def test_as_many_processes_run_at_once_as_there_are_processors(site, monkeypatch):
    for number in range(5):
        offer(site, f"slow{number}", "import time\ntime.sleep(0.3)\n" + WRAPPER, wrapper=True)
    most, now = 0, 0
    begin, end = import_trials._Process.__init__, import_trials._Process.end

    def counted(self, rows, timeout):
        nonlocal most, now
        now += 1
        most = max(most, now)
        begin(self, rows, timeout)

    def ended(self):
        nonlocal now
        now -= 1
        end(self)

    monkeypatch.setattr(import_trials._Process, "__init__", counted)
    monkeypatch.setattr(import_trials._Process, "end", ended)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    seen = []
    found = trials(*(f"slow{number}" for number in range(5)), progress=lambda done, total: seen.append((done, total)))
    assert (most, now) == (3, 0)
    assert [trial.row.name for trial in found] == [f"slow{number}" for number in range(5)], "in the order asked for"
    assert seen == [(number, 5) for number in range(6)]


def test_plugins_of_one_module_share_one_process(site):
    site.add("pair", models={"One": "pair:One", "Two": "pair:Two", "Three": "pair:Three"}, modules=False)
    site.module("pair", "print('once')\n" + MODEL.format(name="One", flag="supports_mrope = True") + "\nTwo = 2\n")
    told, imports = deep("pair", code=1)
    assert {name: each["result"] for name, each in imports.items()} == {
        "One": "ok, prints",
        "Two": "refused",
        "Three": "not importable",
    }
    assert {each["printed"] for each in imports.values()} == {"once\n"}
    kinds = {each["where"].partition(" of ")[0]: each["kind"] for each in told["problems"]}
    assert kinds == {"Two": "contract", "Three": "import"}, "what the source text lacks is told once"


def test_what_cannot_be_imported_anyway_is_not_tried(site):
    site.add("lost", models={"Lost": "lost.model:Lost"}, modules=False)
    site.add("odd", models={"Odd": "odd"}, modules=False)
    told, imports = deep("lost", "odd", code=1)
    assert imports == {} and {each["kind"] for each in told["problems"]} == {"missing-module", "malformed"}


def test_a_blocked_plugin_is_not_imported(site):
    offer(site, "quiet", WRAPPER, wrapper=True)
    offer(site, "blocked", "raise SystemExit", wrapper=True)
    _, imports = deep("quiet", code=0)
    assert set(imports) == {"quiet"}


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_progress_is_shown_on_a_terminal_and_taken_away(site, make_site):
    import pty

    offer(site, "watch", WRAPPER, wrapper=True)
    parent, child = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": make_site.pythonpath()}
    command = [sys.executable, "-m", "torchplug", "doctor", "--deep", "--plugins", "watch"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=child, text=True, timeout=60)
    os.close(child)
    shown = os.read(parent, 10_000).decode()
    os.close(parent)
    assert shown == "\rimporting plugins: 0 of 1\rimporting plugins: 1 of 1\r\x1b[K"
    assert "importing plugins" not in done.stdout
    assert "importing plugins" not in run("--deep", "--plugins", "watch").stderr
