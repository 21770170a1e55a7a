"""`torchplug list`, `show` and `doctor`: what they print, as text and as JSON, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from torchplug.cli import COMMANDS, LazyCommand, main


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def run_json(*arguments):
    result = run(*arguments, "--json")
    return json.loads(result.stdout), result.exit_code


@pytest.fixture
def installed(site):
    """A clean environment of three distributions: torchplug with Llama, a model plugin, a wrapper plugin."""
    site.add("torch", "2.13.0")
    site.add("torchplug", "0.1.0", models={"LlamaForCausalLM": "my_llama.model:LlamaForCausalLM"})
    site.add("my-plug", "2.0", models={"MyModel": "my_plug.model:MyModel"})
    site.add("watcher", "0.5", wrappers={"watch": "watcher:plugin"})
    site.module("watcher", "plugin = object()\n")
    return site


# ---- list ------------------------------------------------------------------------------------------------------------


def test_list_prints_one_plain_line_per_offer_and_wrappers_apart(installed):
    result = run("list")
    lines = result.stdout.splitlines()
    file = installed.root / "my_plug" / "model.py"
    assert lines[0].split() == ["ARCHITECTURE", "DISTRIBUTION", "VERSION", "ENTRY", "POINT", "STATUS", "FILE"]
    assert [line.split()[0] for line in lines[1:3]] == ["LlamaForCausalLM", "MyModel"]
    assert lines[2].split() == ["MyModel", "my-plug", "2.0", "my_plug.model:MyModel", "ok", str(file)]
    assert lines[3] == ""
    assert lines[4].split()[0] == "WRAPPER"
    assert lines[5].split()[:5] == ["watch", "watcher", "0.5", "watcher:plugin", "ok"]
    assert (len(lines), result.exit_code, result.stderr) == (6, 0, "")


def test_list_json(installed):
    found, code = run_json("list")
    assert code == 0 and set(found) == {"selection", "architectures", "wrappers", "warnings"}
    assert found["architectures"][1] == {
        "architecture": "MyModel",
        "distribution": "my-plug",
        "version": "2.0",
        "entry_point": "my_plug.model:MyModel",
        "status": "ok",
        "file": str(installed.root / "my_plug" / "model.py"),
        "note": None,
    }
    assert found["wrappers"][0]["wrapper"] == "watch"
    assert found["selection"] == "everything (TORCHPLUG_PLUGINS is not set)"


def statuses(*arguments):
    found, code = run_json("list", *arguments)
    assert code == 0
    return {(row["architecture"], row["distribution"]): row["status"] for row in found["architectures"]}


def test_list_marks_blocked_conflicting_malformed_and_missing_rows(installed):
    installed.add("rival", models={"MyModel": "rival:MyModel"})
    installed.add("bad", models={"Bad": "bad"}, modules=False)
    installed.add("lost", models={"Lost": "lost.model:Lost"}, modules=False)
    rest = {("Bad", "bad"): "malformed", ("Lost", "lost"): "no module", ("LlamaForCausalLM", "torchplug"): "ok"}
    assert statuses() == {("MyModel", "my-plug"): "conflict", ("MyModel", "rival"): "conflict", **rest}
    owner = {("MyModel", "my-plug"): "passed over", ("MyModel", "rival"): "owner", **rest}
    assert statuses("--owner", "MyModel=Rival") == owner
    blocked = {("MyModel", "my-plug"): "blocked", ("MyModel", "rival"): "ok", **rest}
    assert statuses("--plugins", "*,-my_plug") == blocked
    notes = run("list").stdout.splitlines()[-4:]
    assert any("--owner MyModel=rival" in line for line in notes)
    assert any("no module 'lost.model'" in line for line in notes)


def test_list_with_nothing_enabled_still_shows_what_is_blocked(installed):
    assert set(statuses("--plugins", "").values()) == {"blocked"}
    assert "selection ''" in run("list", "--plugins", "").stdout


def test_list_without_any_plugin_says_so_and_is_no_error(site):
    result = run("list")
    assert (result.stdout, result.exit_code) == ("", 0)
    assert "No installed plugin offers an architecture" in result.stderr


def test_warnings_go_to_stderr_and_json_stays_json(installed):
    result = run("list", "--plugins", "*,-my-plugg", "--json")
    assert "warning" in result.stderr and "did you mean 'my-plug'?" in result.stderr
    assert json.loads(result.stdout)["warnings"]


def test_control_characters_of_metadata_never_reach_the_terminal(installed):
    installed.add("evil", "1\x1b[2J", models={"Evil\x1b[31m": "evil:Evil"})
    for arguments in (["list"], ["doctor"], ["show", "Evil\x1b[31m"], ["show", "No\x1b[31m"]):
        result = run(*arguments)
        assert "\x1b" not in result.stdout + result.stderr
        assert r"\x1b[31m" in result.stdout + result.stderr


# ---- show ------------------------------------------------------------------------------------------------------------


def test_show_names_owner_entry_point_and_file(installed):
    result = run("show", "MyModel")
    assert result.exit_code == 0
    assert "owner         my-plug==2.0 (the only enabled offer)" in result.stdout
    assert "entry point   my_plug.model:MyModel" in result.stdout
    assert f"file          {installed.root / 'my_plug' / 'model.py'}" in result.stdout
    assert "my_plug" not in sys.modules


def test_show_tells_how_the_owner_was_chosen_and_who_else_offers_it(installed):
    installed.add("rival", models={"MyModel": "rival:MyModel"})
    found, code = run_json("show", "MyModel", "--owner", "MyModel=rival")
    assert code == 0 and found["chosen"] == "chosen with --owner" and found["owner"]["distribution"] == "rival"
    assert [(row["distribution"], row["status"]) for row in found["others"]] == [("my-plug", "passed over")]
    found, _ = run_json("show", "my-plug:MyModel")
    assert found["chosen"] == "asked for as 'my-plug:MyModel'" and found["owner"]["distribution"] == "my-plug"
    found, _ = run_json("show", "MyModel", "--plugins", "*,-rival")
    assert [(row["distribution"], row["status"]) for row in found["others"]] == [("rival", "blocked")]


def test_show_of_a_conflict_and_of_a_missing_architecture_fail_with_the_way_out(installed):
    installed.add("rival", models={"MyModel": "rival:MyModel"})
    result = run("show", "MyModel")
    assert (result.exit_code, result.stdout) == (1, "") and "--owner MyModel=" in result.stderr
    result = run("show", "MyMode")
    assert result.exit_code == 1 and "did you mean 'MyModel'?" in result.stderr
    assert "Traceback" not in result.stderr


def test_errors_are_json_when_json_was_asked_for(installed):
    found, code = run_json("show", "Nothing")
    assert code == 1 and found["error"] == "PluginError" and found["problems"][0]["fix"]


_MODEL = """
import torch
from torch import nn
from torchplug import hookimpl

class MyModel(nn.Module):
    supports_mrope = True

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    @hookimpl
    def embed_input_ids(self, input_ids):
        return input_ids

    @hookimpl
    def get_mrope_input_positions(self, input_tokens, mm_features):
        return None

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return input_ids

    def compute_logits(self, hidden_states):
        return hidden_states

    def load_weights(self, weights):
        return set()
"""


@pytest.fixture
def forget_my_plug():
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_plug"]:
        del sys.modules[name]


def test_show_import_prints_interfaces_and_hooks_with_their_phase(installed, forget_my_plug):
    installed.module("my_plug.model", _MODEL)
    result = run("show", "MyModel", "--import", "--plugins", "*,-watcher")
    assert result.exit_code == 0, result.stderr
    assert "class         my_plug.model.MyModel" in result.stdout
    assert "interfaces    SupportsMRoPE" in result.stdout
    hooks = {line.split()[0]: line.split()[1] for line in result.stdout.splitlines() if "(my_plug/model.py" in line}
    assert hooks == {"embed_input_ids": "step", "get_mrope_input_positions": "request"}
    found, _ = run_json("show", "MyModel", "--import", "--plugins", "*,-watcher")
    assert found["class"]["interfaces"] == ["SupportsMRoPE"]
    assert "SupportsMultiModal" in found["class"]["absent"]["embed_multimodal"]


def test_show_import_of_a_broken_plugin_is_an_error_that_names_it(installed, forget_my_plug):
    result = run("show", "MyModel", "--import")
    assert result.exit_code == 1 and "my-plug==2.0" in result.stderr and "a plugin was imported" in result.stderr
    assert "Traceback" not in result.stderr


# ---- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_wrong_with_a_clean_environment(installed):
    result = run("doctor")
    assert result.exit_code == 0 and "No problem found." in result.stdout
    found, code = run_json("doctor")
    assert (code, found["problems"], found["notes"]) == (0, [], [])
    assert found["versions"]["torch"] == "2.13.0" and found["versions"]["python"].startswith("3.")
    assert {each["distribution"]: (each["install"], each["in_use"]) for each in found["distributions"]} == {
        "torchplug": ("wheel", True),
        "my-plug": ("wheel", True),
        "watcher": ("wheel", True),
    }


def test_doctor_reports_every_kind_of_problem_with_a_fix_and_exit_code_1(installed, tmp_path):
    installed.add("rival", models={"MyModel": "rival:MyModel"})
    installed.add("gone", models={"Gone": "gone:Gone"}, modules=False, editable=tmp_path / "gone")
    installed.add("future", groups={"torchplug.models.v2": {"Future": "future:Future"}})
    installed.add("lost", models={"Lost": "lost:Lost"}, modules=False)
    installed.add("typo", models={"Typo": "typo:Typoo"}, modules=False)
    installed.module("typo", "class Typo: ...\n")
    installed.add("bad", models={"Bad": "bad"}, modules=False)
    installed.add("broken", text=b"[x]\n\xff\n")
    arguments = ("--plugins", "*,-my-plgu", "--owner", "Nobody=torchplug")
    found, code = run_json("doctor", *arguments)
    kinds = [each["kind"] for each in found["problems"]]
    assert code == 1 and kinds.count("selection") == 2
    assert set(kinds) == {
        "selection",
        "conflict",
        "orphaned",
        "unknown-group",
        "missing-module",
        "missing-attribute",
        "malformed",
        "unreadable",
    }
    assert all(each["says"] and each["fix"] for each in found["problems"])
    result = run("doctor", *arguments)
    assert result.exit_code == 1 and f"{len(kinds)} problems in the installed plugins" in result.stdout
    for each in found["problems"]:
        assert each["says"].splitlines()[0] in result.stdout and each["fix"].splitlines()[0] in result.stdout


def test_doctor_says_when_torch_or_torchplug_itself_is_not_installed(site):
    found, code = run_json("doctor")
    assert code == 1
    assert {each["where"].split()[0] for each in found["problems"]} == {"torch", "torchplug"}


def test_a_conflict_with_a_chosen_owner_is_no_problem(installed):
    installed.add("rival", models={"MyModel": "rival:MyModel"})
    assert run_json("doctor")[1] == 1
    assert run_json("doctor", "--owner", "MyModel=rival")[1] == 0


def test_harmless_findings_are_notes_and_do_not_fail(make_site):
    source, installed = make_site("source"), make_site("installed")
    installed.add("torch", "2.13.0")
    source.add("torchplug", "0.1.0", models={"Model": "plug:Model"}, egg_info=True)
    installed.add("torchplug", "0.1.0", models={"Model": "plug:Model"}, editable=source.root)
    result = run("doctor")
    assert result.exit_code == 0 and "note: " in result.stdout and "both have the same plugins" in result.stdout
    found, _ = run_json("doctor")
    assert [(each["install"], each["in_use"]) for each in found["distributions"]] == [
        ("egg-info", True),
        ("editable", False),
    ]


def test_the_bug_report_is_one_block_with_provenance_and_without_the_home_directory(installed, monkeypatch):
    monkeypatch.setenv("HOME", str(installed.root.parent))
    installed.add("lost", models={"Lost": "lost:Lost"}, modules=False)
    text = run("doctor", "--plugins", "*,-watcher").stdout
    _, block, after = text.split("-" * 72 + "\n")
    assert after == ""
    for part in (
        "torchplug 0.1.0, python 3.",
        "torch 2.13.0",
        "selection: '*,-watcher'",
        "my-plug==2.0 (wheel) ~/site/my_plug-2.0.dist-info",
        "MyModel = my_plug.model:MyModel [my-plug] ok",
        "watch = watcher:plugin [watcher] blocked",
        "problem missing-module: Lost of lost==1.0",
        "1 problem",
    ):
        assert part in block
    assert str(installed.root.parent) not in block


# ---- the group -------------------------------------------------------------------------------------------------------


def test_unknown_commands_and_bad_owners_are_usage_errors(installed):
    result = run("lst")
    assert result.exit_code == 2 and "Did you mean 'list'?" in result.stderr
    result = run("frobnicate")
    assert result.exit_code == 2 and "list, show, doctor" in result.stderr
    for owner in ("Model", "=x", "Model=", "  = "):
        result = run("list", "--owner", owner)
        assert result.exit_code == 2 and "is not Arch=dist" in result.stderr
    result = run("list", "--owner", "M=a", "--owner", "M=b")
    assert result.exit_code == 2 and "two owners" in result.stderr
    assert run("show").exit_code == 2
    assert run().exit_code == 2 and "Commands:" in run().output


def test_help_and_version():
    result = run("--help")
    assert result.exit_code == 0 and all(f"  {name} " in result.stdout for name in COMMANDS)
    assert run("--version").stdout == "torchplug 0.1.0\n"


_COMMANDS = """
import sys, time
import click
from torchplug.cli.options import json_option, print_json
from torchplug.errors import Problem, RequestError

@click.command()
def wait():
    print("ready", flush=True)
    time.sleep(60)

@click.command()
def much():
    for number in range(100_000):
        print("line", number)

@click.command()
def late():
    sys.stdin.read()
    print("too late, and not flushed")

@click.command()
@json_option
def fail(as_json):
    raise RequestError("prompt 'x'", Problem("max_tokens", "found 0, expected at least 1", "give 1 or more"))

@click.command()
@json_option
def noisy(as_json):
    print("a plugin's greeting")
    print_json(["whole"])

@click.command()
def ask():
    click.prompt("name")
"""
_PROGRAM = """
import sys
from torchplug.cli import COMMANDS, LazyCommand, main
for name in ("wait", "much", "late", "fail", "noisy", "ask"):
    COMMANDS[name] = LazyCommand(f"extra_commands:{name}", "")
main(sys.argv[1:])
"""


@pytest.fixture
def extra_commands(tmp_path):
    """Starts the group with commands that wait, print much, fail or ask, in a process of its own."""
    (tmp_path / "extra_commands.py").write_text(_COMMANDS)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": ""}

    def start(*arguments):
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", _PROGRAM, *arguments]
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    start.environment = environment
    return start


def test_ctrl_c_exits_with_130_and_without_a_traceback(extra_commands):
    import signal

    process = extra_commands("wait")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in stderr


@pytest.mark.parametrize(("command", "lines"), [("much", 1), ("late", 0)])
def test_a_closed_pipe_is_silent(extra_commands, command, lines):
    process = extra_commands(command)
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    process.stdin.close()
    assert process.stderr.read() == ""
    process.wait(timeout=30)
    assert process.returncode == 1


def test_a_torchplug_error_of_any_command_is_text_or_json_and_exit_code_1(extra_commands):
    stdout, stderr = (process := extra_commands("fail")).communicate(timeout=30)
    assert process.returncode == 1 and stdout == ""
    assert stderr == ("torchplug: prompt 'x': max_tokens: found 0, expected at least 1\n  fix: give 1 or more\n")
    stdout, stderr = (process := extra_commands("fail", "--json")).communicate(timeout=30)
    assert process.returncode == 1 and stderr == ""
    assert json.loads(stdout)["problems"][0]["where"] == "max_tokens"


def test_streams_that_the_caller_closed_are_no_fault(extra_commands):
    for redirection, expected in ((">&-", 1), ("<&-", 0), ("2>&-", 1)):
        script = f'exec "$0" -c "$1" "$2" {redirection}'
        command = ["bash", "-c", script, sys.executable, _PROGRAM, "late" if redirection == "<&-" else "fail"]
        result = subprocess.run(command, env=extra_commands.environment, stdin=subprocess.DEVNULL, capture_output=True)
        assert result.returncode == expected and b"Traceback" not in result.stderr, redirection


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a Linux device")
def test_an_output_that_is_full_is_one_line_and_exit_code_1(extra_commands):
    command = ["bash", "-c", 'exec "$0" -c "$1" much >/dev/full', sys.executable, _PROGRAM]
    result = subprocess.run(command, env=extra_commands.environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "torchplug: standard output cannot be written: No space left on device\n"


def test_what_a_plugin_prints_does_not_get_into_the_json(extra_commands):
    stdout, stderr = (process := extra_commands("noisy", "--json")).communicate(timeout=30)
    assert (process.returncode, json.loads(stdout), stderr) == (0, ["whole"], "a plugin's greeting\n")
    stdout, stderr = extra_commands("noisy").communicate(timeout=30)
    assert stdout.startswith("a plugin's greeting\n") and stderr == ""


def test_wrong_usage_is_json_too_where_json_was_asked_for(extra_commands):
    for arguments in (("fail", "--json", "--bogus"), ("fail", "extra", "--json"), ("no-such-command", "--json")):
        stdout, stderr = (process := extra_commands(*arguments)).communicate(timeout=30)
        assert process.returncode == 2 and stderr == ""
        assert json.loads(stdout)["error"] == "UsageError" and json.loads(stdout)["problems"][0]["says"]


def test_the_end_of_input_is_not_an_interrupt(extra_commands):
    process = extra_commands("ask")
    _, stderr = process.communicate("", timeout=30)
    assert process.returncode == 1 and "Traceback" not in stderr


def test_every_command_of_the_table_can_be_loaded_and_has_a_help_page():
    for name, command in COMMANDS.items():
        assert isinstance(command, LazyCommand) and command.help.endswith(".")
        result = run(name, "--help")
        assert result.exit_code == 0 and result.stdout.startswith(f"Usage: torchplug {name}"), name
