"""Commands that read metadata, and every help page, import neither torch nor another heavy library nor a plugin."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
from torchplug.cli import COMMANDS

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "tokenizers",
    "jinja2",
    "gguf",
    "pluggy",
    "rich",
    "torchplug_models",
    "my_plug",
}
"""`my_plug` is an installed plugin that raises when it is imported."""

_PROGRAM = """
import json, sys
statement, report, *sys.argv = sys.argv[1:]
code = 0
try:
    exec(statement)
except SystemExit as exit:
    code = exit.code
with open(report, "w") as file:
    json.dump({"code": code, "modules": sorted({name.partition(".")[0] for name in sys.modules})}, file)
"""


@pytest.fixture
def modules_after(site, make_site, tmp_path):
    """modules_after(statement, *argv): exit code, top-level modules and output of a process that has a plugin."""
    site.add("my-plug", models={"MyModel": "my_plug:MyModel"}, wrappers={"w": "my_plug:w"})

    def after(statement, *arguments, **streams):
        report = tmp_path / "report.json"
        environment = {**os.environ, "PYTHONPATH": make_site.pythonpath(), "COLUMNS": "300", "TERM": "xterm"}
        command = [sys.executable, "-c", _PROGRAM, statement, str(report), "torchplug", *arguments]
        done = subprocess.run(
            command, env=environment, check=False, **({"capture_output": True, "text": True} | streams)
        )
        assert report.exists(), done.stderr
        found = json.loads(report.read_text())
        return found["code"], set(found["modules"]), done.stdout

    return after


MAIN = "from torchplug.cli import main; main()"


def test_the_check_sees_a_heavy_import(modules_after):
    _, modules, _ = modules_after("import numpy")
    assert HEAVY & modules == {"numpy"}


@pytest.mark.parametrize(
    "statement",
    [
        "import torchplug",
        "import torchplug; dir(torchplug)",
        "import torchplug.errors, torchplug.config",
        "import torchplug.host.catalogue, torchplug.host.metadata",
        "from torchplug import Host; Host().architectures['MyModel'].file",
    ],
)
def test_imports_and_discovery(modules_after, statement):
    code, modules, _ = modules_after(statement)
    assert code == 0 and HEAVY & modules == set()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list"], "MyModel"),
        (["list", "--json"], '"MyModel"'),
        (["list", "--plugins", "*,-my-plugg"], "MyModel"),
        (["show", "MyModel"], "my-plug==1.0"),
        (["show", "MyModel", "--json"], '"my-plug"'),
        (["--version"], "torchplug"),
        (["--help"], "Commands:"),
    ],
)
def test_metadata_commands(modules_after, arguments, expected):
    code, modules, stdout = modules_after(MAIN, *arguments)
    assert code == 0 and expected in stdout
    assert HEAVY & modules == set()


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["show", "NoSuchModel"], ["nonsense"]])
def test_metadata_commands_that_may_find_problems(modules_after, arguments):
    code, modules, _ = modules_after(MAIN, *arguments)
    assert code in (0, 1, 2) and HEAVY & modules == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_pages(modules_after, command):
    code, modules, stdout = modules_after(MAIN, command, "--help")
    assert code == 0 and f"Usage: torchplug {command}" in stdout
    assert HEAVY & modules == set()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_rich_draws_the_table_on_a_terminal_only(modules_after):
    import pty

    parent, child = pty.openpty()
    code, modules, _ = modules_after(MAIN, "list", stdout=child, stderr=child, capture_output=False)
    os.close(child)
    drawn = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while piece := os.read(parent, 100_000):
            drawn += piece
    os.close(parent)
    assert code == 0 and "rich" in modules
    assert b"MyModel" in drawn and "─".encode() in drawn
    assert HEAVY & modules == {"rich"}


def test_a_lookup_imports_hardly_more_than_the_metadata_library():
    """Start-up is the cost of the scan: what explains, checks or imports plugins is loaded when it is needed."""
    code = "import sys; from torchplug import Host; 'X' in Host().architectures; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    ours = {name for name in loaded if name.startswith("torchplug.")}
    assert ours == {"torchplug.host", "torchplug.host.catalogue", "torchplug.host.selection"}
    assert not {"dataclasses", "inspect", "pluggy", "torch"} & set(loaded)
