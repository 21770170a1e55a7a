"""A hybrid model from an outside package: its wheel installed, checked and run where nothing of this checkout is."""

from __future__ import annotations

import json
import zipfile
from pathlib import PurePosixPath

import pytest
from kinds_of_checks import OF_EXPERTS, OF_ITEMS, outcomes_without

pytestmark = pytest.mark.packaging

PROGRAM = """
import json, logging, torch
from torchplug import Host, LLMEngine, SamplingParams
from torchplug.testing import Specimen

specimen = Specimen("RecurrentGemmaForCausalLM")
engine = LLMEngine(specimen.load(torch.device("cpu")))
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
found = []
for name in ("cold", "warm"):
    engine.add_request(name, specimen.token_ids(40), params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    found.append([outputs[-1].outputs[0].token_ids, outputs[-1].num_cached_tokens])
print(json.dumps({"found": found, "cache": str(engine.kv_cache), "held": engine.num_held_blocks}))
"""


@pytest.fixture(scope="module")
def installed(with_samples):
    return with_samples("torchplug-recurrentgemma")


def test_it_conforms(installed):
    done = installed.torchplug("check", "RecurrentGemmaForCausalLM", "--json")
    checks = {check["check"]: check["outcome"] for check in json.loads(done.stdout)["checks"]}
    assert checks == {name: str(outcome) for name, outcome in outcomes_without(OF_EXPERTS | OF_ITEMS).items()}


def test_it_runs_with_blocks_and_states_and_from_the_prefix_cache(installed):
    report = json.loads(installed.run("-c", PROGRAM, OMP_NUM_THREADS="1").stdout)
    (cold, none), (warm, cached) = report["found"]
    assert cold == warm and len(set(cold)) > 1 and (none, cached, report["held"]) == (0, 32, 0)
    assert "blocks" in report["cache"] and "for snapshots" in report["cache"]


def test_show_says_how_it_is_cached(installed):
    shown = installed.torchplug("show", "RecurrentGemmaForCausalLM", "--import").stdout
    assert "IsHybrid" in shown and "and a state per request of its recurrent ones" in shown


def test_the_wheel_is_the_plugin_alone(sample):
    names = {PurePosixPath(name) for name in zipfile.ZipFile(sample("torchplug-recurrentgemma").wheel).namelist()}
    code = {name for name in names if not name.parts[0].endswith(".dist-info")}
    files = ("__init__.py", "recurrent.py", "recurrentgemma.py")
    assert code == {PurePosixPath("torchplug_recurrentgemma", name) for name in files}
