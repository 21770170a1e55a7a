"""Packages with one model class each, as pip would have left them."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

import importlib_metadata
import pytest

HERE = Path(__file__).parent
_numbers = count()


class Package:
    """A distribution that offers the architecture `name` from `module`.

    Each fault is (old text, new text) of the file `healthy`.
    """

    def __init__(self, root, *fault, healthy="healthy.py"):
        self.root = root
        number = next(_numbers)
        self.module, self.name = f"planted_{number}", f"Planted{number}ForCausalLM"
        source = (HERE / healthy).read_text()
        for old, new in fault:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        root.mkdir(parents=True, exist_ok=True)
        (root / f"{self.module}.py").write_text(source.replace("HealthyForCausalLM", self.name))
        self.register(f"planted-package-{number}")

    def register(self, distribution, group="torchplug.models.v1"):
        info = self.root / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{self.name} = {self.module}:{self.name}\n")
        importlib_metadata.MetadataPathFinder.invalidate_caches()


@pytest.fixture
def make_package(tmp_path, monkeypatch):
    """make_package((old, new), ..., healthy="healthy_vl.py") makes and installs a package."""
    root = tmp_path / "site"
    monkeypatch.syspath_prepend(root)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")])))
    modules = set(sys.modules)

    def make(*faults, healthy="healthy.py"):
        return Package(root, *faults, healthy=healthy)

    yield make
    for name in set(sys.modules) - modules:
        if name.startswith("planted_"):
            del sys.modules[name]
