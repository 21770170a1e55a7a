"""What the trace says, where it says it, and that it disturbs nobody: on a model of this file, and on no other."""

from __future__ import annotations

import json
import sys
import threading
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import torchplug_trace
from torchplug import Host
from torchplug.hookspecs import HOOKS
from torchplug_trace import FORM_VARIABLE, make_trace

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

MODEL = '''
from torch import nn
from torchplug import hookimpl
from torchplug.interfaces import SupportsMultiModal


class ProbeForCausalLM(nn.Module, SupportsMultiModal):
    """Has no weights; one of its hooks calls another, and one may raise."""

    hooks = None

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    @hookimpl
    @classmethod
    def get_placeholder_str(cls, modality, i):
        return f"<{modality}>"

    @hookimpl
    def get_language_model(self):
        self.hooks and self.hooks.get_num_mm_encoder_tokens(3)
        return self

    @hookimpl
    def get_num_mm_encoder_tokens(self, num_image_tokens):
        if num_image_tokens < 0:
            raise ValueError("fewer than none")
        return num_image_tokens * 4

    @hookimpl
    def embed_multimodal(self, *, pixel_values, names=()):
        return [values + 1 for values in pixel_values]

    @hookimpl
    def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None, handle_oov_mm_token=False):
        return input_ids.unsqueeze(1).float()

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds

    def compute_logits(self, hidden_states):
        return hidden_states

    def load_weights(self, weights):
        return set()
'''


def distribution(site, name, version, group, entries):
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A checkpoint of a model that a distribution `probe` offers; this package is installed beside it."""
    from safetensors.torch import save_file

    site, directory = tmp_path / "site", tmp_path / "probe"
    site.mkdir()
    directory.mkdir()
    (site / "probe_model.py").write_text(MODEL)
    distribution(site, "probe", "1.0", "torchplug.models.v1", {"ProbeForCausalLM": "probe_model:ProbeForCausalLM"})
    group = "torchplug.plugins.v1"
    distribution(site, PROJECT["name"], PROJECT["version"], group, PROJECT["entry-points"][group])
    monkeypatch.syspath_prepend(site)
    monkeypatch.delenv("TORCHPLUG_PLUGINS", raising=False)
    monkeypatch.setattr(torchplug_trace.trace, "form", "text")
    (directory / "config.json").write_text(json.dumps({"architectures": ["ProbeForCausalLM"], "dtype": "float32"}))
    save_file({}, directory / "model.safetensors")
    yield directory
    sys.modules.pop("probe_model", None)


@pytest.fixture
def model(checkpoint):
    """Without the installed trace: only what a test attaches is there."""
    return Host("probe").load(checkpoint, device="cpu")


def test_installed_it_writes_a_line_per_call_to_stderr_and_none_to_stdout(checkpoint, capsys):
    host = Host()
    model = host.load(checkpoint, device="cpu")
    assert model.hooks.get_num_mm_encoder_tokens(7) == 28
    assert host.model_class("ProbeForCausalLM").hooks.get_placeholder_str("image", 2) == "<image>"
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == ""
    assert first.startswith("torchplug-trace: ProbeForCausalLM.get_num_mm_encoder_tokens(num_image_tokens=7) -> 28  [")
    assert first.endswith(" us]")
    assert second.startswith(
        "torchplug-trace: ProbeForCausalLM.get_placeholder_str(modality='image', i=2) -> '<image>'  ["
    )


def test_it_wraps_every_hook_of_the_table():
    assert {name for name in dir(torchplug_trace.trace) if name in HOOKS} == set(HOOKS)


def test_shapes_dtypes_and_devices_are_told_however_deep_the_tensors_lie(model):
    lines = []
    model.attach(make_trace("text", write=lines.append))
    pixels = [torch.ones(2, 3), torch.ones(4, 3, dtype=torch.bfloat16)]
    model.hooks.embed_multimodal(pixel_values=pixels, names=["a", "b", "c", "d", "e", "f"])
    model.hooks.embed_input_ids(torch.tensor([1, 2]), is_multimodal=torch.tensor([True, False]))
    multimodal, embed = (line.rpartition("  [")[0] for line in lines)
    assert multimodal == (
        "torchplug-trace: ProbeForCausalLM.embed_multimodal(mm_kwargs={pixel_values: [float32[2, 3] on cpu, "
        "bfloat16[4, 3] on cpu], names: ['a', 'b', 'c', 'd', 2 more]}) -> [float32[2, 3] on cpu, bfloat16[4, 3] on cpu]"
    )
    assert embed == (
        "torchplug-trace: ProbeForCausalLM.embed_input_ids(input_ids=int64[2] on cpu, multimodal_embeddings=None, "
        "is_multimodal=bool[2] on cpu, handle_oov_mm_token=False) -> float32[2, 1] on cpu"
    )


def test_json_lines_are_objects_with_the_same(model):
    lines = []
    model.attach(make_trace("json", write=lines.append))
    model.hooks.embed_input_ids(torch.tensor([1, 2]))
    model.hooks.get_language_model()
    embed, language = map(json.loads, lines)
    assert embed.pop("us") > 0 and all(line.count("\n") == 1 for line in lines)
    tensor = {"dtype": "int64", "shape": [2], "device": "cpu"}
    assert embed == {
        "hook": "embed_input_ids",
        "model": "ProbeForCausalLM",
        "depth": 0,
        "arguments": {
            "input_ids": tensor,
            "multimodal_embeddings": None,
            "is_multimodal": None,
            "handle_oov_mm_token": False,
        },
        "result": {"dtype": "float32", "shape": [2, 1], "device": "cpu"},
    }
    assert language["arguments"] == {} and language["result"] == {"type": "ProbeForCausalLM"}


def test_the_environment_chooses_the_form_and_another_one_leaves_the_plugin_out(checkpoint, monkeypatch, capsys):
    monkeypatch.setenv(FORM_VARIABLE, "json")
    assert make_trace().form == "json"
    monkeypatch.setenv(FORM_VARIABLE, "")
    assert make_trace().form == "text"
    with pytest.raises(ValueError, match=r"form is 'xml', expected 'text' or 'json'"):
        make_trace("xml")
    monkeypatch.setenv(FORM_VARIABLE, "xml")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchplug_trace"]:
        monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Host().load(checkpoint, device="cpu")
    (warning,) = caught
    assert str(warning.message).startswith(f"wrapper plugin 'trace' ({PROJECT['name']}==")
    assert "TORCHPLUG_TRACE is 'xml', expected 'text' or 'json'" in str(warning.message)
    assert model.hooks.get_num_mm_encoder_tokens(1) == 4 and capsys.readouterr().err == ""


def test_a_call_inside_another_comes_first_and_is_indented(model):
    lines = []
    model.attach(make_trace("text", write=lines.append))
    model.module.hooks = model.hooks
    model.hooks.get_language_model()
    model.hooks.get_num_mm_encoder_tokens(1)
    assert [line.partition("(")[0] for line in lines] == [
        "torchplug-trace:   ProbeForCausalLM.get_num_mm_encoder_tokens",
        "torchplug-trace: ProbeForCausalLM.get_language_model",
        "torchplug-trace: ProbeForCausalLM.get_num_mm_encoder_tokens",
    ]


def test_a_call_that_raises_is_told_with_its_error_which_goes_on(model):
    lines, objects = [], []
    model.attach(make_trace("text", write=lines.append))
    model.attach(make_trace("json", write=objects.append))
    with pytest.raises(ValueError, match="fewer than none"):
        model.hooks.get_num_mm_encoder_tokens(-1)
    model.hooks.get_num_mm_encoder_tokens(1)
    assert "(num_image_tokens=-1) ! ValueError: fewer than none  [" in lines[0]
    failed, after = map(json.loads, objects)
    assert failed["error"] == "ValueError: fewer than none" and "result" not in failed
    assert after["depth"] == 0 and after["result"] == 4, "what failed is over"


def test_threads_do_not_count_each_others_calls(model):
    objects = []
    model.attach(make_trace("json", write=objects.append))
    barrier = threading.Barrier(2, timeout=10)
    model.module.hooks = type("Waits", (), {"get_num_mm_encoder_tokens": lambda self, count: barrier.wait()})()
    threads = [threading.Thread(target=model.hooks.get_language_model) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [json.loads(line)["depth"] for line in objects] == [0, 0]


def test_a_closed_stderr_does_not_fail_a_step(model, tmp_path, monkeypatch):
    closed = (tmp_path / "closed").open("w")
    closed.close()
    model.attach(make_trace("text"))
    monkeypatch.setattr(sys, "stderr", closed)
    assert model.hooks.get_num_mm_encoder_tokens(1) == 4


def test_it_costs_nothing_to_models_without_it_and_leaves_nothing_behind(checkpoint):
    host = Host("probe")
    one, other = (host.load(checkpoint, device="cpu") for _ in range(2))
    before = {name: getattr(handle.hooks, name) for handle in (one, other) for name in dir(handle.hooks)}
    lines = []
    with one.attached(make_trace(write=lines.append)):
        assert all(getattr(other.hooks, name) is before[name] for name in dir(other.hooks))
        other.hooks.get_num_mm_encoder_tokens(1)
        host.model_class("ProbeForCausalLM").hooks.get_placeholder_str("image", 1)
    one.hooks.get_num_mm_encoder_tokens(1)
    assert lines == []
