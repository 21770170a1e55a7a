"""The pytest plugin: a mark for the conformance checks and a fixture for an author's own tests.

pytest imports it in every run of an environment that has torchplug, so it imports nothing and does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchplug.host.model import LoadedModel


def pytest_configure(config: pytest.Config) -> None:
    """Make the mark known, for `-m torchplug_conformance` and for --strict-markers."""
    config.addinivalue_line("markers", "torchplug_conformance: a check of torchplug's conformance kit")


@pytest.fixture
def torchplug_tiny() -> Iterator[Callable[..., LoadedModel]]:
    """torchplug_tiny(target, device="cpu", dtype="float32", **options): the class loaded with tiny random weights.

    `target` and `options` as for `torchplug.testing.Specimen`. Models are closed when the test ends.
    """
    opened: list[Any] = []

    def load(target: Any, *, device: str = "cpu", dtype: str = "float32", **options: Any) -> LoadedModel:
        from torchplug.host.devices import resolve_device, resolve_dtype
        from torchplug.testing.specimen import Specimen

        where = resolve_device(device)
        specimen = Specimen(target, devices=[where], **options)
        opened.append(specimen)
        return specimen.load(where, resolve_dtype(dtype, None, where))

    yield load
    for specimen in opened:
        specimen.close()
