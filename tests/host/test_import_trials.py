"""The child's program of a trial import, run here: what it writes down, and that it leaves this process as it was."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import pytest
from torchplug.host import import_trial, import_trials
from torchplug.host.catalogue import MODELS, WRAPPERS, Catalogue
from torchplug.host.import_trials import Trial, run_trials

WRAPPER = "from torchplug import hookimpl\n\n\n@hookimpl(wrapper=True)\ndef embed_input_ids():\n    return (yield)\n"


@pytest.fixture
def tried(site, tmp_path, capfd):
    """tried(source, group, attribute) runs the program on one plugin and returns what it wrote."""

    def run(source, group=WRAPPERS, attribute="", name="guest"):
        value = name + (f":{attribute}" if attribute else "")
        site.add(name, groups={group: {name: value}}, modules=False)
        site.module(name, source)
        answer = tmp_path / "answer.json"
        before = (threading.Thread.start, [*sys.meta_path], [os.fstat(number).st_ino for number in (1, 2)])
        import_trial.main(
            {
                "module": name,
                "entry_points": [(group, name, value, f"{name}==1.0")],
                "answer": str(answer),
                "output": str(tmp_path / "output"),
            }
        )
        after = (threading.Thread.start, [*sys.meta_path], [os.fstat(number).st_ino for number in (1, 2)])
        assert before == after and capfd.readouterr() == ("", "")
        return json.loads(answer.read_text())

    return run


def test_a_wrapper_plugin_is_imported_and_checked(tried):
    told = tried("import os\nos.write(1, b'hello\\n')\n" + WRAPPER)
    assert (told["output"], told["threads"], told["environment"], told["torch_seconds"]) == ("hello\n", [], [], None)
    assert told["seconds"] >= 0
    assert told["plugins"] == [{"kind": "import", "problems": [], "warnings": [], "offers": ["embed_input_ids"]}]


def test_a_wrapper_plugin_with_a_fault_is_refused(tried):
    (found,) = tried(WRAPPER.replace("wrapper=True", "hookwrapper=True"))["plugins"]
    assert found["kind"] == "contract" and found["problems"][0]["says"] == "is an old-style hookwrapper"


def test_a_model_class_is_checked(tried):
    (found,) = tried("class Guest: ...\n", MODELS, "Guest")["plugins"]
    assert found["kind"] == "contract"
    assert found["problems"][0]["says"] == "does not derive from torch.nn.Module"


GOOD = """
from torch import nn


class Guest(nn.Module):
    supports_lora = True

    def __init__(self, *, vllm_config, prefix=""): ...

    def embed_input_ids(self, input_ids): ...

    def get_placeholder_str(self, modality, i): ...

    def forward(self, input_ids, positions): ...

    def compute_logits(self, hidden_states): ...

    def load_weights(self, weights): ...
"""


def test_what_a_class_offers_and_what_is_odd_about_it(tried):
    (found,) = tried(GOOD, MODELS, "Guest")["plugins"]
    assert found["offers"] == ["SupportsLoRA"] and found["problems"] == []
    assert [each["says"] for each in found["warnings"]] == ["nobody calls it: Guest does not claim SupportsMultiModal"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise SystemExit(2)", "tries to end the process: SystemExit(2)"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ],
)
def test_what_the_import_raised_is_told_and_the_import_is_not_repeated(tried, tmp_path, source, says):
    count = tmp_path / "count"
    told = tried(f"with open({str(count)!r}, 'a') as file: file.write('x')\n{source}\n")
    (found,) = told["plugins"]
    assert [each["says"] for each in found["problems"]] == [says] and count.read_text() == "x"


def test_a_missing_attribute_and_one_that_raises_are_told(tried):
    (found,) = tried(WRAPPER, attribute="nothing")["plugins"]
    assert found["problems"][0]["says"] == "guest has no 'nothing'"
    (found,) = tried("def __getattr__(name): raise KeyboardInterrupt\n", attribute="it", name="rude")["plugins"]
    assert found["kind"] == "import" and found["problems"][0]["says"] == "KeyboardInterrupt"


def test_threads_and_environment_of_the_import_are_told_and_those_of_torch_are_not(tried, site, monkeypatch):
    """Another module called torch stands in for the real one, which is imported here already."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.delenv("OF_TORCH", raising=False)
    monkeypatch.delenv("OF_GUEST", raising=False)
    noisy = "import os, threading\nos.environ['OF_{0}'] = '1'\n"
    noisy += "_it = threading.Thread(target=int, name='{0}')\n_it.start()\n"
    site.module("torch", noisy.format("TORCH") + "import types\n_C = types.SimpleNamespace()\n")
    told = tried(noisy.format("GUEST") + "_it.join()\nimport torch\n")
    for name in ("OF_TORCH", "OF_GUEST"):
        os.environ.pop(name, None)
    assert told["environment"] == ["OF_GUEST"] and told["devices"] == []
    assert [each.partition(" ")[0] for each in told["threads"]] == ["GUEST"]
    assert told["threads"][0].endswith("guest.py:4)")
    assert 0 <= told["torch_seconds"] <= told["seconds"]


def test_a_device_that_is_in_use_is_told(tried, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert tried("")["devices"] == ["cuda"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert tried("", name="other")["devices"] == []


# -- the asking side -----------------------------------------------------------------------------------------


def test_nothing_to_try_starts_nothing():
    seen = []
    assert run_trials([], progress=lambda *counts: seen.append(counts)) == [] and seen == [(0, 0)]


def test_an_answer_that_is_torn_is_a_death(site):
    """A thread of the plugin may end the process while the answer is written."""
    source = "import pathlib\npathlib.Path.write_text = lambda self, text, **_: self.write_bytes(b'{')\n" + WRAPPER
    site.add("torn", wrappers={"torn": "torn"}, modules=False)
    site.module("torn", source)
    (row,) = Catalogue(selection="torn").wrappers
    (trial,) = run_trials([row])
    assert trial.kind == "import" and trial.problems[0].says.startswith("ends the process: ")


@pytest.mark.parametrize(
    ("status", "words"), [(3, "exit code 3"), (-signal.SIGKILL, "signal SIGKILL"), (-190, "signal 190")]
)
def test_how_a_process_ended(status, words):
    assert import_trials._ending(status) == words


def test_a_model_may_import_torch_and_a_wrapper_should_not(site):
    site.add("both", models={"Both": "both:Both"}, wrappers={"both": "both"})
    rows = {type(row).__name__: row for row in Catalogue(selection="both").rows()}
    assert list(Trial(rows["ModelPlugin"], torch_seconds=1.0).side_effects()) == []
    (warning,) = Trial(rows["WrapperPlugin"], torch_seconds=1.0).side_effects()
    assert warning.says == "imports torch"
