"""Checks that need a process of their own: what an import does, and what a process that starts later discovers."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any, Final

from torchplug.errors import PluginError, Problem
from torchplug.host import locate
from torchplug.testing import probe
from torchplug.testing.findings import Finding
from torchplug.testing.specimen import Skip, Specimen

_IMPORTS_ONLY: Final = "let the module define classes and functions, and do this in the model's constructor or later"

_FIXES: Final = {
    "environment variable": "read the environment, and leave it as it is",
    "interpreter": "leave the interpreter as it is: every package of the process shares it",
    "thread": "start threads when a model is built, and end them with it",
    "signal handler": "leave signals to the program",
    "logging": "log to logging.getLogger(__name__), and let the program configure logging",
    "random state": "use a torch.Generator of your own",
    "torch setting": "every model of the process shares this; set it around the code that needs it",
    "device": "use a device when a model is built on it: an import must not take its memory",
    "attribute": "do not patch: every package of the process would see it",
}


def import_contract(specimen: Specimen) -> Iterator[Finding]:
    """In an interpreter that has only torch and torchplug, importing the class changes nothing and prints nothing."""
    module, name = specimen.module_and_name
    if not locate.module_exists(module):
        raise Skip(f"a new process could not import {module!r}, which holds the class")
    answer = probe_import(module, name)
    where = f"import of {module}"
    if answer["error"]:
        says = f"expected the class {name} in a fresh interpreter, found {answer['error']}"
        yield Problem(where, says, "import what the module needs in the module itself")
        return
    if answer["output"]:
        says = f"expected no output, found {answer['output'].strip()[:200]!r}"
        yield Problem(where, says, "remove the print, or the warning's cause; log with logging where it helps")
    for kind, changed, before, after in answer["changes"]:
        says = f"expected the process as it was, found {kind} {changed} changed from {before} to {after}"
        yield Problem(where, says, f"{_FIXES[kind]}; {_IMPORTS_ONLY}")
    if not specimen.class_problems:
        here = {"interfaces": sorted(specimen.report.interfaces), "hooks": sorted(specimen.report.implementations)}
        for what, expected in here.items():
            if answer[what] != expected:
                says = f"expected the {what} that the class has here, {expected}, found {answer[what]} there"
                yield Problem(where, says, "let the class body not depend on what else the process has done")
    yield f"import {answer['milliseconds']:.0f} ms beyond torch"


def discovery_in_a_new_process(specimen: Specimen) -> Iterator[Finding]:
    """A new interpreter with the same environment has the same offers and the same owner."""
    if specimen.plugin is None:
        raise Skip("given as a class, not by its architecture")
    architecture = str(specimen.architecture)
    arguments = ["discover", architecture, json.dumps(specimen.plugins), json.dumps(specimen.owners)]
    # -P: a worker does not have this directory on its import path, nor does this one.
    command = [sys.executable, "-P", "-m", "torchplug.testing.probe", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=probe.PATIENCE)
    where = f"architecture {architecture!r}"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        yield Problem(where, f"a new process cannot use the catalogue: {' '.join(last)}", "see `torchplug doctor`")
        return
    here = probe.discovered(architecture, specimen.plugins, specimen.owners)
    there = json.loads(done.stdout)
    for what, expected in here.items():
        if there[what] != expected:
            says = f"expected the {what} that this process has, {expected}; a new process has {there[what] or 'none'}"
            fix = "install the package (pip install -e . while you work on it); sys.path of this process is not enough"
            yield Problem(where, says, fix)


def probe_import(module: str, name: str) -> dict[str, Any]:
    """What `torchplug.testing.probe.imported` finds for `module:name`, in a process without any plugin.

    The process has this one's import path, environment and working directory. `error` is the only key where it ended.
    """
    request = {
        "module": module,
        "name": name,
        "path": sys.path,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
    }
    line = ""
    for _ in range(2):  # a server that has ended, as it does where there is no fork, is started again
        try:
            requests, answers = _server()
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            line = answers.readline()
        except OSError:
            line = ""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        _stop()
    raise PluginError("the probe process", Problem("", "ended without an answer", "see what it wrote to stderr"))


_process: subprocess.Popen[str] | None = None


def start_probe() -> None:
    """Start the process that imports torch for the probes, so that it is ready by the time it is asked."""
    _server()


def _server() -> tuple[IO[str], IO[str]]:
    global _process
    if _process is None:
        command = [sys.executable, "-P", "-m", "torchplug.testing.probe", "import"]
        _process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(_stop)
    assert _process.stdin is not None and _process.stdout is not None
    return _process.stdin, _process.stdout


def _stop() -> None:
    """End the process: it ends by itself when nobody can ask it any more."""
    global _process
    process, _process = _process, None
    atexit.unregister(_stop)
    if process is not None and process.stdin is not None and process.stdout is not None:
        try:
            process.stdin.close()
        except OSError:
            pass
        process.wait()
        process.stdout.close()
