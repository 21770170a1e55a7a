"""The conformance kit: checks that a model class keeps its promises, for authors' tests and for `torchplug check`.

`test_conforms = conformance("MyForCausalLM")` in a test file makes every check a test of its own; `check_model` runs
them all. Importing this package imports no torch: names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {
    "CHECKS": "torchplug.testing.checks",
    "Check": "torchplug.testing.checks",
    "ConformanceError": "torchplug.testing.checks",
    "Outcome": "torchplug.testing.checks",
    "Result": "torchplug.testing.checks",
    "Specimen": "torchplug.testing.specimen",
    "check_model": "torchplug.testing.checks",
    "conformance": "torchplug.testing.pytest_items",
}

__all__ = [
    "CHECKS",
    "Check",
    "ConformanceError",
    "Outcome",
    "Result",
    "Specimen",
    "check_model",
    "conformance",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'torchplug.testing' has no attribute {name!r}")


if TYPE_CHECKING:
    from torchplug.testing.checks import CHECKS as CHECKS
    from torchplug.testing.checks import Check as Check
    from torchplug.testing.checks import ConformanceError as ConformanceError
    from torchplug.testing.checks import Outcome as Outcome
    from torchplug.testing.checks import Result as Result
    from torchplug.testing.checks import check_model as check_model
    from torchplug.testing.pytest_items import conformance as conformance
    from torchplug.testing.specimen import Specimen as Specimen
