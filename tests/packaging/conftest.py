"""Real wheels in a real environment: built once, installed once, and used from outside by all packaging tests.

The environment has no pip and sees neither the checkout nor what else is installed here: only the two wheels, and
links to the distributions that their metadata require, so that nothing is downloaded and a forgotten requirement shows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import venv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_plugins"
GPT2 = SAMPLES / "torchplug-gpt2"


def outside(
    command: Iterable[object], cwd: Path, *, code: int | None = 0, settings: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as a user elsewhere would, with `settings` and without those of this process; `code` None takes any
    exit."""
    ours = ("PYTHON", "TORCHPLUG", "VIRTUAL_ENV", "PIP_", "COV_", "PYTEST")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)} | (settings or {})
    arguments = [str(part) for part in command]
    done = subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert code is None or done.returncode == code, (
        f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    return done


@dataclass(frozen=True)
class Environment:
    """A virtual environment, used from the empty directory `cwd`."""

    root: Path
    cwd: Path

    @property
    def bin(self) -> Path:
        return self.root / ("Scripts" if os.name == "nt" else "bin")

    def python(self, code: str) -> str:
        """What a program prints."""
        return self.run("-c", code).stdout.strip()

    def run(self, *arguments: object, **settings: str) -> subprocess.CompletedProcess[str]:
        """The environment's Python, with more environment variables in `settings`."""
        return outside([self.bin / "python", *arguments], self.cwd, settings=settings)

    def torchplug(self, *arguments: object, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """The command, as its console script starts it."""
        return outside([self.bin / "torchplug", *arguments], self.cwd, code=code)

    def pip(self, *arguments: object) -> str:
        """This process's pip, at work in the environment, without the network."""
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "--disable-pip-version-check"]
        return outside([*pip, *arguments], self.cwd).stdout

    def install(self, wheel: Path) -> None:
        self.pip("install", "--quiet", "--no-index", "--no-deps", wheel)

    def uninstall(self, name: str) -> None:
        self.pip("uninstall", "--quiet", "--yes", name)

    @property
    def site(self) -> Path:
        return Path(self.python("import sysconfig; print(sysconfig.get_path('purelib'))"))


@dataclass(frozen=True)
class Built:
    """What a project's build leaves: its source archive, and the wheel that was built from that archive."""

    sdist: Path
    wheel: Path


def build(project: Path, out: Path) -> Built:
    outside([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project], out.parent)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Built]:
    """Distribution name to what its build left."""
    projects = {"torchplug": ROOT, "torchplug-gpt2": GPT2}
    return {name: build(project, tmp_path_factory.mktemp(name)) for name, project in projects.items()}


@pytest.fixture(scope="session")
def environment(built: Mapping[str, Built], tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The two wheels installed. A test that changes it puts it back."""
    root = tmp_path_factory.mktemp("fresh")
    venv.create(root / "venv", with_pip=False, symlinks=os.name != "nt")
    (root / "elsewhere").mkdir()
    fresh = Environment(root / "venv", root / "elsewhere")
    for each in built.values():
        fresh.install(each.wheel)
    link_requirements(list(distributions(path=[str(fresh.site)])), root / "requirements")
    (fresh.site / "requirements.pth").write_text(str(root / "requirements"))
    return fresh


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """sample(name) builds one of sample_plugins/, once."""
    return cache(lambda name: build(SAMPLES / name, tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def with_samples(environment: Environment, sample: Callable[[str], Built]) -> Iterable[Callable[..., Environment]]:
    """with_samples(name, ...) installs more samples beside the two wheels, until the end of the module."""
    installed: list[str] = []

    def install(*names: str) -> Environment:
        for name in names:
            if name not in installed:
                environment.install(sample(name).wheel)
                installed.append(name)
        return environment

    yield install
    for name in installed:
        environment.uninstall(name)


@pytest.fixture
def without_gpt2(environment: Environment, built: Mapping[str, Built]) -> Iterable[Environment]:
    environment.uninstall("torchplug-gpt2")
    yield environment
    environment.install(built["torchplug-gpt2"].wheel)


@pytest.fixture
def with_a_broken_package(environment: Environment, tmp_path: Path) -> Iterable[Environment]:
    """A third distribution, whose model and whose wrapper cannot be imported."""
    project = tmp_path / "broken"
    project.mkdir()
    (project / "broken_plugin.py").write_text("import nothing_of_this_name\n\nclass BrokenForCausalLM: ...\n")
    (project / "pyproject.toml").write_text(
        textwrap.dedent(
            """
            [build-system]
            requires = ["hatchling"]
            build-backend = "hatchling.build"
            [project]
            name = "broken-plugin"
            version = "3.1"
            [project.entry-points."torchplug.models.v1"]
            BrokenForCausalLM = "broken_plugin:BrokenForCausalLM"
            [project.entry-points."torchplug.plugins.v1"]
            broken = "broken_plugin"
            """
        )
    )
    environment.install(build(project, tmp_path / "dist").wheel)
    yield environment
    environment.uninstall("broken-plugin")


def link_requirements(installed: Iterable[Distribution], directory: Path) -> None:
    """Link into `directory` what `installed` require, directly and indirectly, from the environment of this process."""
    directory.mkdir()
    for each in required(installed).values():
        assert each.files, f"{each.name} does not say which files it has"
        for top in {file.parts[0] for file in each.files} - {"..", "__pycache__"}:
            if not (directory / top).exists():
                (directory / top).symlink_to(each.locate_file(top))


def required(
    installed: Iterable[Distribution], extras: Iterable[str] = ("",), found: dict[str, Distribution] | None = None
) -> dict[str, Distribution]:
    """Name with extras to distribution, of everything that `installed` with `extras` need to run besides torchplug."""
    found = {} if found is None else found
    for text in [text for each in installed for text in each.requires or ()]:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = f"{canonicalize_name(requirement.name)}{sorted(requirement.extras)}"
        if key not in found and canonicalize_name(requirement.name) != "torchplug":
            found[key] = distribution(requirement.name)
            required([found[key]], ("", *requirement.extras), found)
    return found
