"""The dependency direction, and that first-party plugins have no privileges: read from the imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core" / "torchplug"

RANKS = {
    "errors": 0,
    "results": 1,
    "config": 1,
    "forward_context": 1,
    "protocols": 1,
    "interfaces": 2,
    "layers": 3,
    "hookspecs": 3,
    "multimodal": 3,
    "host": 4,
    "engine": 5,
    "testing": 6,
    "cli": 7,
    "__main__": 8,
}
"""Every part of the package; a part imports only parts of a lower rank, or itself."""

DEFAULT_BODIES = {"protocols", "interfaces"}
"""The interfaces' default bodies may import `layers` when they run."""

PUBLIC = {
    "torchplug",
    "torchplug.interfaces",
    "torchplug.layers",
    "torchplug.multimodal",
    "torchplug.testing",
}
"""What a third party, and therefore a first-party plugin, may import."""


def imports(path):
    """(module, whether at module level) of every torchplug import that is not for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
            if (
                node.module == "torchplug"
            ):  # `from torchplug import interfaces` names a part, any other name is a lazy one
                names = [f"torchplug.{a.name}" if a.name in RANKS else "torchplug" for a in node.names]
        for name in names:
            if name.split(".")[0] == "torchplug":
                yield name, node in tree.body


def part(module):
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=lambda path: str(path.relative_to(CORE)))
def test_parts_import_only_what_is_below_them(path):
    own = path.relative_to(CORE).parts[0].removesuffix(".py")
    if own == "__init__":
        assert list(imports(path)) == [], "the package itself imports lazily"
        return
    for module, at_top in imports(path):
        other = part(module)
        if own in DEFAULT_BODIES and other == "layers" and not at_top:
            continue
        if other == "":
            assert own == "cli", f"{path} imports the package's lazy names; name the module"
        elif other != own:
            assert RANKS[other] < RANKS[own], f"{path} imports {module}, which is above it"


def test_every_part_has_a_rank():
    parts = {path.relative_to(CORE).parts[0].removesuffix(".py") for path in CORE.rglob("*.py")}
    assert parts - {"__init__"} == set(RANKS)


@pytest.mark.parametrize(
    "path",
    sorted([*ROOT.glob("plugins/**/*.py"), *ROOT.glob("sample_plugins/*/src/**/*.py")]),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_plugins_import_only_public_modules(path):
    assert {module for module, _ in imports(path)} <= PUBLIC


def test_no_file_is_called_utils():
    assert not [path for path in ROOT.glob("**/util*.py") if ".venv" not in path.parts]
