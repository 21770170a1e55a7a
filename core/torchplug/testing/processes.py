"""Checks that need a process of their own: what an import does, and what a process that starts later discovers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

from torchplug.errors import Problem
from torchplug.host import locate
from torchplug.testing import probe
from torchplug.testing.findings import Finding
from torchplug.testing.probe_server import probe_import
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
        here = {
            "refused": None,
            "interfaces": sorted(specimen.report.interfaces),
            "hooks": sorted(specimen.report.implementations),
        }
        for what, expected in here.items():
            if answer[what] != expected:
                says = f"expected the class as it is here ({what}: {expected}), found {what}: {answer[what]}"
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
