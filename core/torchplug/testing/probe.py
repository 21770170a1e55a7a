"""What importing a model plugin does to a process, and what a new process discovers: the programs that find out.

`python -m torchplug.testing.probe import` imports torch once and then answers one request per line of standard input.
Each is served in a fork of that interpreter, in which no plugin has been imported yet: as good as a fresh one, without
torch's import time for every class. Where there is no fork it serves one request and ends. `... discover ARCH` prints
what the catalogue of a new process says of an architecture.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, Final

State = dict[str, Any]

PATIENCE: Final = 120.0
"""Seconds that an import may take."""


def main(arguments: list[str]) -> None:
    """The program: `import`, or `discover ARCHITECTURE SELECTION OWNERS`, the last two as JSON."""
    if arguments[0] == "discover":
        architecture, selection, owners = arguments[1], json.loads(arguments[2]), json.loads(arguments[3])
        print(json.dumps(discovered(architecture, selection, owners)))
        return
    _load_what_plugins_build_on()
    # Answers go to the standard output as it is now: the code under examination gets another one.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for line in sys.stdin:
        request = json.loads(line)
        answer = _in_a_fork(request) if hasattr(os, "fork") else imported(request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if not hasattr(os, "fork"):
            break


def discovered(architecture: str, selection: str | None, owners: dict[str, str]) -> dict[str, Any]:
    """What the catalogue of this process says of an architecture: its offers and its owner."""
    from torchplug.errors import PluginError
    from torchplug.host.catalogue import Catalogue

    catalogue = Catalogue(selection=selection, owners=owners)
    name = architecture.rpartition(":")[2]
    try:
        owner = catalogue.owner(architecture).origin
    except PluginError as error:
        owner = "; ".join(problem.says for problem in error.problems)
    offers = catalogue.models.get(name, ())
    return {
        "owner": owner,
        "offers": sorted(f"{row.origin} {row.value} {row.file}" for row in offers),
        "selection": str(catalogue.selection),
    }


def imported(request: dict[str, Any]) -> dict[str, Any]:
    """Import `module`, take `name` out of it, and say what that changed.

    Args:
        request: `module`, `name`, and the import path, environment and directory to do it in.

    Returns `error` (None, or what the import raised), `milliseconds`, `output` (what it printed), `changes` (kind of
    state, name, before, after), `refused` (None, or why the host refuses the class), its `interfaces` and `hooks`.
    """
    from torchplug.errors import ContractError
    from torchplug.host.contracts import inspect_class

    sys.path[:] = request["path"]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path_importer_cache.clear()
    answer: dict[str, Any] = {"error": None, "refused": None, "interfaces": [], "hooks": []}
    before = _state()
    found: Any = None
    with tempfile.TemporaryFile() as output:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        began = time.perf_counter()
        try:
            __import__(request["module"])
            found = sys.modules[request["module"]]
            for part in request["name"].split("."):
                found = getattr(found, part)
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answer["milliseconds"] = 1000 * (time.perf_counter() - began)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        output.seek(0)
        answer["output"] = output.read().decode(errors="replace")
    after = _state()
    answer["changes"] = [
        (kind, name, _shown(before[kind].get(name)), _shown(after[kind].get(name)))
        for kind in before
        for name in sorted({**before[kind], **after[kind]})
        if not _same(kind, name, before[kind], after[kind])
    ]
    if isinstance(found, type):
        try:
            report = inspect_class(found, subject="")
            answer["interfaces"], answer["hooks"] = sorted(report.interfaces), sorted(report.implementations)
        except ContractError as error:
            answer["refused"] = "; ".join(f"{problem.where} {problem.says}" for problem in error.problems)
    return answer


def _load_what_plugins_build_on() -> None:
    """What a plugin may import without an effect of its own."""
    from torchplug.errors import PluginError
    from torchplug.host.torch_import import import_torch

    try:
        import_torch()
    except PluginError:  # the asking process meets the same, and says it
        sys.exit(1)
    import torch
    import torch.nn.functional

    import torchplug.host.contracts
    import torchplug.host.model
    import torchplug.interfaces
    import torchplug.layers  # noqa: F401

    torch.zeros(1)


def _in_a_fork(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as answer:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                json.dump(imported(request), answer)
                answer.flush()
                status = 0
            finally:
                os._exit(status)
        deadline = time.monotonic() + PATIENCE
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                return {"error": f"the import did not end within {PATIENCE:.0f} seconds"}
            time.sleep(0.002)
        if status:
            return {"error": f"the process ended with code {os.waitstatus_to_exitcode(status)} during the import"}
        answer.seek(0)
        found: dict[str, Any] = json.load(answer)
        return found


# -- the state of a process ------------------------------------------------------------------------------


def _state() -> dict[str, State]:
    """Everything of this process that an import has no business changing, by kind and name."""
    return {kind: read() for kind, read in _KINDS.items()}


def _environment() -> State:
    return dict(os.environ)


def _interpreter() -> State:
    return {
        "working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.meta_path": [repr(finder) for finder in sys.meta_path],
        "sys.excepthook": repr(sys.excepthook),
        "sys.stdout": repr(sys.stdout),
        "sys.stderr": repr(sys.stderr),
        "recursion limit": sys.getrecursionlimit(),
    }


def _threads() -> State:
    import _thread
    import threading

    names = {str(thread.ident): thread.name for thread in threading.enumerate()}
    return {"threads": sorted(names.values()), "number of threads": _thread._count()}


def _signals() -> State:
    import signal

    return {number.name: repr(signal.getsignal(number)) for number in signal.valid_signals() if hasattr(number, "name")}


def _logging() -> State:
    import logging

    root = logging.getLogger()
    return {"handlers of the root logger": [repr(each) for each in root.handlers], "root level": root.level}


def _random_state() -> State:
    import hashlib
    import random

    import numpy
    import torch

    def digest(value: bytes) -> str:
        return hashlib.sha1(value).hexdigest()[:8]

    return {
        "of random": digest(repr(random.getstate()).encode()),
        "of numpy": digest(repr(numpy.random.get_state()).encode()),
        "of torch": digest(torch.get_rng_state().numpy().tobytes()),
    }


def _torch_settings() -> State:
    import torch
    from torch.nn.modules import module

    hooks = {
        f"torch.nn global {name.removeprefix('_global_')}": len(value)
        for name, value in vars(module).items()
        if name.startswith("_global_") and hasattr(value, "__len__")
    }
    return hooks | {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "number of computing threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _devices() -> State:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cuda", "xpu", *([accelerator.type] if accelerator is not None else [])}
    found = {}
    for kind in sorted(kinds):
        ready = getattr(getattr(torch, kind, None), "is_initialized", None)
        if ready is not None:
            found[kind] = bool(ready())
    return found


def _attributes() -> State:
    """The objects behind the public names of Python, torch and torchplug, and of their base classes."""
    import builtins

    import torch

    ours = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "torchplug"]
    modules = [builtins, torch, torch.nn, torch.nn.functional, torch.nn.init, *filter(None, ours)]
    classes = {torch.Tensor, torch.nn.Module, torch.nn.Parameter}
    for module in ours:
        classes |= {value for value in vars(module).values() if isinstance(value, type) and _is_ours(value)}
    owners: list[Any] = [*modules, *classes]
    return {
        f"{owner.__name__}.{name}": value
        for owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("_") and f"{owner.__name__}.{name}" != "torch.Storage"  # follows the default dtype
    }


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torchplug"


_KINDS: Final[dict[str, Callable[[], State]]] = {
    "environment variable": _environment,
    "interpreter": _interpreter,
    "thread": _threads,
    "signal handler": _signals,
    "logging": _logging,
    "random state": _random_state,
    "torch setting": _torch_settings,
    "device": _devices,
    "attribute": _attributes,
}


def _same(kind: str, name: str, before: State, after: State) -> bool:
    if kind != "attribute":
        return bool(before.get(name) == after.get(name))
    # A name that was not there before may be a submodule that somebody imported; one that is another object is a patch.
    return name not in before or (name in after and before[name] is after[name])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


if __name__ == "__main__":
    main(sys.argv[1:])
