"""Trial imports: every module of plugins in a process of its own, several at once, so that no import can do harm here.

A process has its own session, so that what it starts can be ended with it: when it is late, when it has ended, and
when this process is interrupted. The child's program is `torchplug.host.import_trial`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torchplug.errors import Problem
from torchplug.host.catalogue import ModelPlugin, PluginRow
from torchplug.host.importing import other_version

TIMEOUT: Final = 120.0
"""Seconds that a module's import and the checks of its classes may take."""

_POLL: Final = 0.02
"""Seconds between two looks at the running processes."""

_CHILD: Final = (
    "import json, os, sys; request = json.loads(sys.argv[1]); sys.path[:] = request['path']; "
    "from torchplug.host.import_trial import main; main(request); os._exit(0)"
)
"""It does not wait for threads: a plugin may have started one that never ends."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the import of one plugin did.

    Attributes:
        row: The plugin.
        seconds: Duration of its module's import, torch included; None where the process did not tell.
        torch_seconds: Torch's part of it; None where torch was not imported.
        output: What the import printed.
        threads: Threads that it started, `name (file:line)`.
        devices: Kinds of accelerator that it initialised.
        environment: Names of the environment variables that it changed.
        offers: Interfaces of a model class, hooks of a wrapper plugin.
        kind: "import", "timeout" or "contract": what `problems` are about.
        problems: Why it cannot be used.
        warnings: What is legal and probably not meant.
    """

    row: PluginRow
    seconds: float | None = None
    torch_seconds: float | None = None
    output: str = ""
    threads: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    kind: str = "import"
    problems: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = field(default=())

    def side_effects(self) -> Iterator[Problem]:
        """What the import did besides defining things: nothing of it stops the plugin, all of it surprises others."""
        module = f"import of {self.row.module}"
        author = "its author should do this when a model is built, not when the module is imported"
        if self.output:
            first = self.output.strip().partition("\n")[0]
            fix = "its author should remove it or use logging: it mixes with the output of commands"
            yield Problem(module, f"prints {first[:100]!r}", fix)
        for thread in self.threads:
            yield Problem(module, f"starts a thread: {thread}", author)
        for device in self.devices:
            says = f"initialises the device {device!r}: every process that imports it takes device memory, and none can"
            yield Problem(module, f"{says} fork", author)
        if self.environment:
            names = ", ".join(self.environment)
            fix = "its author should read the environment and leave it as it is: others read it too"
            yield Problem(module, f"changes the environment: {names}", fix)
        if self.torch_seconds is not None and not isinstance(self.row, ModelPlugin):
            fix = "its author should import torch inside the functions that need it"
            yield Problem(module, "imports torch", fix)


def run_trials(
    rows: Iterable[PluginRow],
    *,
    timeout: float = TIMEOUT,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """Import every module that `rows` name in a process of its own, `os.cpu_count()` of them at once.

    Args:
        rows: Plugins whose entry points are well formed. Those of one module share its process.
        timeout: Seconds for one module.
        progress: Called as progress(plugins done, plugins in all).
    """
    groups: dict[tuple[str, str], list[PluginRow]] = {}
    for row in rows:
        groups.setdefault((row.origin, row.module), []).append(row)
    waiting, total = list(groups.values()), sum(map(len, groups.values()))
    running: list[_Process] = []
    done: list[Trial] = []
    progress(0, total)
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                running.append(_Process(waiting.pop(0), timeout))
            for process in running[:]:
                trials = process.poll()
                if trials is not None:
                    running.remove(process)
                    done.extend(trials)
                    progress(len(done), total)
            if running:
                time.sleep(_POLL)
    finally:
        for process in running:
            process.end()
    order = [row for group in groups.values() for row in group]
    return sorted(done, key=lambda trial: order.index(trial.row))


class _Process:
    """One running trial."""

    def __init__(self, rows: list[PluginRow], timeout: float) -> None:
        self._rows = rows
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._directory = tempfile.TemporaryDirectory(prefix="torchplug-")
        self._answer = Path(self._directory.name, "answer.json")
        self._printed = Path(self._directory.name, "printed")
        self._said = open(Path(self._directory.name, "said"), "w+b")  # noqa: SIM115 - closed by `end`
        request = {
            "path": sys.path,
            "module": rows[0].module,
            "entry_points": [(row.entry_point.group, row.name, row.value, row.origin) for row in rows],
            "answer": str(self._answer),
            "output": str(self._printed),
        }
        # -P: the working directory must not be searched before the request's own path is in force.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=self._said,
            start_new_session=True,
        )

    def poll(self) -> list[Trial] | None:
        """The trials of the module's plugins once the process has ended or is late; None while it runs."""
        status = self._process.poll()
        if status is None and time.monotonic() < self._deadline:
            return None
        try:
            if status is None:
                says, fix = f"does not end within {self._timeout:g} seconds", "give it more time with --timeout"
                return self._failed("timeout", says, fix)
            answer = self._read_answer()
            if status != 0 or answer is None:
                return self._failed("import", f"ends the process: {_ending(status)}{self._last_words()}", "")
            return self._told(answer)
        finally:
            self.end()

    def end(self) -> None:
        """End the process and all that it has started; what it left behind is removed."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        self._said.close()
        self._directory.cleanup()

    def _read_answer(self) -> dict[str, Any] | None:
        try:
            answer: dict[str, Any] = json.loads(self._answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # The process ended before or while it wrote.
            return None
        return answer

    def _told(self, answer: dict[str, Any]) -> list[Trial]:
        return [
            Trial(
                row,
                answer["seconds"],
                answer["torch_seconds"],
                answer["output"],
                tuple(answer["threads"]),
                tuple(answer["devices"]),
                tuple(answer["environment"]),
                tuple(found["offers"]),
                found["kind"],
                tuple(Problem(**each) for each in found["problems"]),
                tuple(Problem(**each) for each in found["warnings"]),
            )
            for row, found in zip(self._rows, answer["plugins"], strict=True)
        ]

    def _failed(self, kind: str, says: str, fix: str) -> list[Trial]:
        return [
            Trial(
                row,
                kind=kind,
                problems=(
                    Problem(f"import of {row.module}", says, ", or ".join(filter(None, (fix, other_version(row))))),
                ),
            )
            for row in self._rows
        ]

    def _last_words(self) -> str:
        self._said.seek(0)
        said = self._said.read() + (self._printed.read_bytes() if self._printed.exists() else b"")
        lines = said.decode(errors="replace").strip().splitlines()
        return f" ({lines[-1][:200]})" if lines else ""


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit code {status}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
