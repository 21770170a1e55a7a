"""Shared by the oracle tests: one host, one thread (two make small models slower), and everything marked `oracle`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small matrices are faster on one thread, and two that wait for each other on a busy machine are far slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def host() -> object:
    """A host with its defaults: whatever is installed, nothing blocked."""
    import torchplug

    return torchplug.Host()
