"""From hook calls to lines: when a call started, what went in, and what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torchplug

from torchplug_trace.shapes import in_words, shape_of

FORM_VARIABLE = "TORCHPLUG_TRACE"
"""Environment variable: "text" (also when it is not set) or "json"."""


def make_trace(form: str | None = None, write: Callable[[str], object] | None = None) -> Any:
    """A wrapper plugin that reports every hook call of the models to which it is attached.

    Args:
        form: "text" or "json"; None is what the environment variable TORCHPLUG_TRACE says.
        write: Called with each line, its newline included; None writes to sys.stderr.

    The plugin's attributes `form` and `write` may be changed at any time.

    Raises:
        ValueError: the form is another one.
    """
    source = "form" if form else FORM_VARIABLE
    form = form or os.environ.get(FORM_VARIABLE) or "text"
    if form not in ("text", "json"):
        raise ValueError(f"{source} is {form!r}, expected 'text' or 'json'")
    open_calls = threading.local()

    def start(hook: str, model: Any, arguments: dict[str, Any]) -> None:
        if not hasattr(open_calls, "started"):
            open_calls.started = []
        open_calls.started.append(time.perf_counter_ns())

    def finish(hook: str, model: Any, arguments: dict[str, Any], outcome: dict[str, Any]) -> None:
        microseconds = (time.perf_counter_ns() - open_calls.started.pop()) / 1000
        record = {
            "hook": hook,
            "model": (model if isinstance(model, type) else type(model)).__name__,
            "us": round(microseconds, 1),
            "depth": len(open_calls.started),
            "arguments": {name: shape_of(value) for name, value in arguments.items()},
            **outcome,
        }
        line = json.dumps(record) if plugin.form == "json" else _as_text(record)
        # A closed or full stderr is no reason to fail a step.
        with contextlib.suppress(OSError, ValueError):
            (plugin.write or sys.stderr.write)(f"{line}\n")

    plugin = torchplug.observer(
        before=start,
        after=lambda hook, model, arguments, result: finish(hook, model, arguments, {"result": shape_of(result)}),
        failed=lambda hook, model, arguments, error: finish(
            hook, model, arguments, {"error": f"{type(error).__name__}: {error}"}
        ),
    )
    plugin.__name__ = "trace"
    plugin.form, plugin.write = form, write
    return plugin


def _as_text(record: dict[str, Any]) -> str:
    arguments = ", ".join(f"{name}={in_words(value)}" for name, value in record["arguments"].items())
    came = f"! {record['error']}" if "error" in record else f"-> {in_words(record['result'])}"
    indent = "  " * record["depth"]
    return f"torchplug-trace: {indent}{record['model']}.{record['hook']}({arguments}) {came}  [{record['us']:.1f} us]"
