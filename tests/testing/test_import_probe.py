"""What an import changes is seen, whatever it is; each kind of state is planted once."""

from __future__ import annotations

import pytest
from torchplug.testing.probe import _KINDS
from torchplug.testing.probe_server import probe_import

PLANTED = {
    "environment variable": ("import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'", "TOKENIZERS_PARALLELISM"),
    "interpreter": ("import sys\nsys.path.append('planted')", "sys.path"),
    "thread": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
    "signal handler": ("import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)", "SIGTERM"),
    "logging": ("import logging\nlogging.basicConfig()", "handlers of the root logger"),
    "random state": ("import random\nrandom.seed(0)", "of random"),
    "torch setting": ("import torch\ntorch.set_default_dtype(torch.float64)", "default dtype"),
    "device": ("import torch\ntorch.cuda._initialized = True", "cuda"),
    "attribute": (
        "import torch\ntorch.nn.functional.gelu = torch.nn.functional.relu",
        "torch.nn.functional.gelu",
    ),
}


@pytest.fixture
def probed(tmp_path, monkeypatch):
    """probed(name, source) imports a module in a process of its own; this one never does."""
    monkeypatch.syspath_prepend(tmp_path)

    def probe(name, source):
        (tmp_path / f"{name}.py").write_text(source + "\nclass Model: pass\n")
        return probe_import(name, "Model")

    return probe


def test_every_kind_of_state_is_planted():
    assert set(PLANTED) == set(_KINDS)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_change_is_seen_and_nothing_else(probed, kind):
    source, name = PLANTED[kind]
    answer = probed(f"changes_{kind.replace(' ', '_')}", source)
    assert answer["error"] is None and answer["output"] == ""
    assert {(changed, what) for changed, what, _, _ in answer["changes"]} >= {(kind, name)}
    assert {changed for changed, *_ in answer["changes"]} == {kind}


def test_a_patch_of_torchplugs_own_layers_is_seen(probed):
    source = "from torchplug.layers import Attention\nAttention.forward = Attention.kv_cache_spec"
    assert [change[:2] for change in probed("patches_ours", source)["changes"]] == [["attribute", "Attention.forward"]]


def test_a_module_that_does_nothing_changes_nothing(probed):
    answer = probed("does_nothing", "import torch, json\nfrom torchplug.layers import Attention")
    assert (answer["error"], answer["output"], answer["changes"]) == (None, "", [])
    assert answer["milliseconds"] < 1000


def test_output_of_a_subprocess_and_of_c_code_is_seen(probed):
    source = "import os, sys\nos.write(1, b'one\\n')\nos.system('echo two >&2')\nprint('three')"
    assert set(probed("prints", source)["output"].split()) == {"one", "two", "three"}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise ValueError('planted')", "ValueError: planted"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import os\nos._exit(7)", "ended with code 7"),
        ("import no_such_module_at_all", "ModuleNotFoundError"),
    ],
)
def test_an_import_that_fails_is_told_and_the_next_one_works(probed, source, expected):
    assert expected in probed(f"fails_{len(expected)}", source)["error"]
    assert probed(f"works_{len(expected)}", "")["error"] is None
