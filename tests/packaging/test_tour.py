"""Every hook of the table through an installed wheel, called by a program that sees nothing of this checkout."""

from __future__ import annotations

import json
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from torchplug.hookspecs import HOOKS, Phase

pytestmark = pytest.mark.packaging

TOUR = Path(__file__).parents[2] / "sample_plugins" / "torchplug-tour"


@pytest.fixture(scope="module")
def report(with_samples):
    """What hook_trials.py prints, run once in the environment of the wheels."""
    environment = with_samples("torchplug-tour")
    done = environment.run(TOUR / "tests" / "hook_trials.py", OMP_NUM_THREADS="1")
    return json.loads(done.stdout)


def test_the_code_under_trial_comes_from_the_wheels(report, environment):
    version = tomllib.loads((TOUR / "pyproject.toml").read_text())["project"]["version"]
    assert report["plugin"] == ["torchplug-tour", version]
    for file in report["files"]:
        assert Path(file).resolve().is_relative_to(environment.site.resolve()), file


def test_every_hook_of_the_table_is_tried_on_every_device(report):
    """Counted from the table of this checkout; a hook without a case is missing here."""
    assert report["hooks"] == list(HOOKS)
    tried = {(trial["hook"], trial["device"]) for trial in report["results"]}
    assert tried == {(name, device) for name in HOOKS for device in report["devices"]}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_does_what_it_must_and_refuses_what_it_must(report, name):
    trials = [trial for trial in report["results"] if trial["hook"] == name]
    kinds = {trial["kind"] for trial in trials}
    faces = [f"{way}, {on}" for way in ("direct", "wrapped") for on in ("model", "class")]
    for face in faces if HOOKS[name].phase is Phase.CLASS else faces[::2]:
        assert f"right, {face}" in kinds
        assert len([kind for kind in kinds if kind.startswith("author returns wrong") and kind.endswith(face)]) >= 3
    assert len([kind for kind in kinds if kind.startswith("wrapper returns wrong")]) >= 3
    for argument in HOOKS[name].places:
        assert {f"{argument} in a wrong place, {way}" for way in ("direct", "wrapped")} <= kinds
    failed = {trial["kind"]: trial["failed"] for trial in trials if trial["failed"]}
    assert not failed, "\n".join(f"{kind}:\n{text}" for kind, text in failed.items())


def test_list_and_doctor_know_it(with_samples):
    environment = with_samples("torchplug-tour")
    listed = json.loads(environment.torchplug("list", "--json").stdout)["architectures"]
    rows = {row["architecture"]: row for row in listed if row["distribution"] == "torchplug-tour"}
    assert set(rows) == {"TourForCausalLM", "TourRecurrentForCausalLM"}
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert "No problem found" in environment.torchplug("doctor").stdout


def test_the_wheel_is_the_plugin_alone(sample):
    names = {PurePosixPath(name) for name in zipfile.ZipFile(sample("torchplug-tour").wheel).namelist()}
    code = {name for name in names if not name.parts[0].endswith(".dist-info")}
    files = ("__init__.py", "decoder.py", "recurrent.py", "tour.py")
    assert code == {PurePosixPath("torchplug_tour", name) for name in files}
