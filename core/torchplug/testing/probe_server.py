"""The process in which plugins are imported for examination (`torchplug.testing.probe`), from the asking side.

Nothing here imports torch, so that the process can be started first and import its own meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import subprocess
import sys
from typing import IO, Any

from torchplug.errors import PluginError, Problem


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
        with contextlib.suppress(OSError):
            process.stdin.close()
        process.wait()
        process.stdout.close()
