"""A trial import: one module of plugins imported in this process alone, and what that did. The program of the child.

`torchplug.host.import_trials` starts it once per module. It reports what an operator wants to know: time, output,
torch, threads, devices, environment, and then the problems and warnings of every plugin in the module.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> None:
    """Import `request["module"]` and write what happened, as JSON, to the file `request["answer"]`.

    Args:
        request: `module`, `entry_points` (a list of group, name, value and origin), `answer`, and `output`, a file for
            what the plugins print. The import path is this process's.
    """
    captured = Path(request["output"])
    answer, error = _imported(request["module"], captured)
    answer["plugins"] = [_examined(error, captured, *each) for each in request["entry_points"]]
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


def _imported(module: str, captured: Path) -> tuple[dict[str, Any], BaseException | None]:
    """What the import did, and what it raised."""
    torch = _TorchClock()
    threads: list[str] = []
    environment = dict(os.environ)
    sys.meta_path.insert(0, torch)
    with _captured(captured) as output, _noted_threads(threads, torch):
        began = time.perf_counter()
        raised: BaseException | None = None
        try:
            importlib.import_module(module)
        except BaseException as error:
            # KeyboardInterrupt too: raised by the plugin, since nobody types in a process of its own.
            raised = error
        seconds = time.perf_counter() - began
    sys.meta_path.remove(torch)
    changed = {
        name
        for name in {*environment, *os.environ} - torch.environment
        if environment.get(name) != os.environ.get(name)
    }
    answer = {
        "seconds": seconds,
        "torch_seconds": torch.seconds,
        "output": output(),
        "threads": threads,
        "environment": sorted(changed),
        "devices": _initialised_devices(),
    }
    return answer, raised


def _examined(
    raised: BaseException | None, captured: Path, group: str, name: str, value: str, origin: str
) -> dict[str, Any]:
    """The problems and warnings of one plugin, in the words that the host has for them, and what it offers."""
    from torchplug.errors import ContractError, PluginError
    from torchplug.host.catalogue import MODELS, ModelPlugin, WrapperPlugin, read_entry_points
    from torchplug.host.importing import import_object, import_problem, import_wrapper

    kind = ModelPlugin if group == MODELS else WrapperPlugin
    rows = (kind(each) for each in read_entry_points()[0] if each.group == group)
    row = next(row for row in rows if (row.name, row.value, row.origin) == (name, value, origin))
    found: dict[str, Any] = {"kind": "import", "problems": [], "warnings": [], "offers": []}
    if raised is not None:
        return found | {"problems": [asdict(import_problem(row, raised))]}
    try:
        with _captured(captured):
            if group == MODELS:
                from torchplug.host.contracts import inspect_class

                report = inspect_class(import_object(row), subject="")
                found |= {"warnings": [asdict(each) for each in report.warnings], "offers": sorted(report.interfaces)}
            else:
                found["offers"] = sorted(import_wrapper(row).hook_names)
    except PluginError as error:
        kind_of_error = "contract" if isinstance(error, ContractError) else "import"
        found |= {"kind": kind_of_error, "problems": [asdict(each) for each in error.problems]}
    except BaseException as error:
        found["problems"] = [asdict(import_problem(row, error))]
    return found


class _TorchClock:
    """A finder that finds nothing itself: it sees torch's own import, and keeps its effects apart from the plugin's."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self.environment: set[str] = set()
        self.running = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = self._timed(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
        return spec

    def _timed(self, execute: Callable[[Any], None]) -> Callable[[Any], None]:
        def timed(module: Any) -> None:
            before, began, self.running = dict(os.environ), time.perf_counter(), True
            try:
                execute(module)
            finally:
                self.running, self.seconds = False, time.perf_counter() - began
                names = {*before, *os.environ}
                self.environment |= {name for name in names if before.get(name) != os.environ.get(name)}

        return timed


@contextmanager
def _noted_threads(threads: list[str], torch: _TorchClock) -> Iterator[None]:
    """Collect `name (file:line)` of each thread that is started, but not by torch's own import."""
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if not torch.running:
            inner = ("threading.py", "thread.py", os.path.basename(__file__))
            callers = [each for each in traceback.extract_stack() if os.path.basename(each.filename) not in inner]
            threads.append(f"{thread.name} ({callers[-1].filename}:{callers[-1].lineno})")
        start(thread)

    threading.Thread.start = noted  # type: ignore[method-assign, assignment]
    known = set(sys._current_frames())
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        others = set(sys._current_frames()) - known - {thread.ident for thread in threading.enumerate()}
        threads.extend("a thread without a name" for _ in others)


@contextmanager
def _captured(path: Path) -> Iterator[Callable[[], str]]:
    """Standard output and error, those of C code and subprocesses included, go to a file; the result reads it."""
    text = ""
    with path.open("w+b") as file:
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield lambda: text
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            text = file.read().decode(errors="replace")


def _initialised_devices() -> list[str]:
    """Kinds of accelerator on which torch, if it is imported, has begun to work."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    kinds = ("cuda", "xpu", "mtia", getattr(torch._C, "_get_privateuse1_backend_name", lambda: "")())
    ready = {kind: getattr(getattr(torch, kind, None), "is_initialized", None) for kind in kinds}
    return [kind for kind, asked in ready.items() if asked is not None and asked()]
