"""`conformance(...)`: the checks as pytest tests, each an item with its own name and message."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest

from torchplug.errors import TorchplugWarning
from torchplug.testing.checks import _BY_NAME, CHECKS, Check, Outcome, run_check
from torchplug.testing.specimen import Specimen


def conformance(
    target: str | os.PathLike[str] | type, *, skip: Mapping[str, str] | None = None, **options: Any
) -> Callable[..., None]:
    """A test function that pytest runs once for each check.

        test_conforms = conformance("MyForCausalLM")

    Args:
        target: An installed architecture, "package.module:Class", a checkpoint, or a class.
        skip: Names of checks to leave out, and why.
        options: `config`, `weights`, `plugins`, `owners`, `devices`, as for `Specimen`.

    Raises:
        KeyError: `skip` names no check.
    """
    reasons = dict(skip or {})
    for name in reasons:
        if name not in _BY_NAME:
            raise KeyError(f"no check is called {name!r}; the checks are {', '.join(_BY_NAME)}")

    @cache
    def specimen() -> Specimen:
        return Specimen(target, **options)  # when the first item runs: collecting tests imports no plugin

    @pytest.mark.torchplug_conformance
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    def test_conforms(check: Check, record_property: Callable[[str, object], None]) -> None:
        result = run_check(check, specimen(), reasons.get(check.name, ""))
        for note in result.notes:
            record_property(check.name, note)
        for problem in result.warnings:
            text = f"{result.subject}: {problem.where}: {problem.says}\n  fix: {problem.fix}"
            warnings.warn(text, TorchplugWarning, stacklevel=1)
        if result.outcome is Outcome.SKIPPED:
            pytest.skip(result.reason)
        if result.outcome is Outcome.FAILED:
            pytest.fail(str(result.error()), pytrace=False)

    return test_conforms
