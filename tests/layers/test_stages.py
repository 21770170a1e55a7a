"""Parts of a model that are left out: marked by name, replaced by placeholders, built without memory."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, MultiModalConfig, VllmConfig
from torchplug.errors import ContractError
from torchplug.interfaces import SupportsMultiModal
from torchplug.layers.stages import StageMissingLayer, collect_children, no_init_weights, stage_missing_prefixes


def make_config(limits=None, encoder_only=False, multimodal=True) -> VllmConfig:
    hf_config = HfConfig({}, source="test/config.json")
    settings = MultiModalConfig(limits or {}, mm_encoder_only=encoder_only) if multimodal else None
    return VllmConfig(ModelConfig("test", hf_config, torch.float32, 64, settings), DeviceConfig(torch.device("cpu")))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.register_buffer("table", torch.arange(4.0))
        assert self.table.sum().item() == 6, "values computed while building must be there"

    def forward(self, x):
        return self.norm(x)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.width = 4
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight

    def embed_input_ids(self, input_ids):
        return self.embed(input_ids)

    def twice(self):
        return 2 * self.width


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x):
        return self.proj(x)


class Ears(Tower):
    pass


class Model(SupportsMultiModal, nn.Module):
    def __init__(self, vllm_config):
        super().__init__()
        with self._mark_tower_model(vllm_config, {"video", "image"}):
            self.vision = Tower()
            self.connector = nn.Linear(4, 4)
        with self._mark_tower_model(vllm_config, "audio"):
            self.ears = Ears()
        with self._mark_language_model(vllm_config):
            self.newline = nn.Parameter(torch.ones(4))
            self.language_model = Language()
            self.extra = nn.Linear(4, 4)


class Whole(nn.Module):
    """A model that another library builds in one piece."""

    def __init__(self):
        super().__init__()
        self.text = Language()
        self.encoders = nn.ModuleDict({"eyes": Tower(), "ears": Ears()})


class Composite(SupportsMultiModal, nn.Module):
    def __init__(self, vllm_config):
        super().__init__()
        with self._mark_composite_model(
            vllm_config, language_targets=Language, tower_targets={"image": Tower, "audio": (Ears,)}
        ):
            self.model = Whole()


def test_everything_is_built_and_named_where_nothing_is_left_out():
    for config in (make_config(), make_config(multimodal=False), make_config({"image": 0, "audio": 1})):
        model = Model(config)
        assert model._tower_model_names == ["vision", "connector", "ears"]
        assert model._language_model_names == ["language_model", "extra"]
        assert stage_missing_prefixes(model) == ()
        assert not any(p.is_meta for p in model.parameters())
        assert SupportsMultiModal._tower_model_names == SupportsMultiModal._language_model_names == []


def test_encoder_only_replaces_the_language_model():
    model = Model(make_config(encoder_only=True))
    assert model._language_model_names == ["language_model", "extra"]
    assert isinstance(model.language_model, StageMissingLayer) and isinstance(model.extra, StageMissingLayer)
    assert stage_missing_prefixes(model) == ("language_model.", "extra.")
    names = {"newline", "vision.proj.weight", "vision.proj.bias", "connector.weight", "connector.bias"}
    assert set(model.state_dict()) == names | {"ears.proj.weight", "ears.proj.bias"}
    assert not any(t.is_meta for t in model.state_dict().values())
    assert model.get_language_model() is model.language_model


@pytest.mark.parametrize(
    "limits, missing",
    [
        ({"image": 0, "video": 0}, ("vision.", "connector.")),
        ({"image": 0}, ()),
        ({"video": 0, "audio": 0}, ("ears.",)),
        ({"image": 0, "video": 0, "audio": 0}, ("vision.", "connector.", "ears.")),
    ],
)
def test_tower_goes_when_all_its_limits_are_zero(limits, missing):
    model = Model(make_config(limits))
    assert stage_missing_prefixes(model) == missing
    assert not any(name.startswith(missing) for name in model.state_dict() if missing)
    if "vision." in missing:
        assert model.vision.stage_name == "vision_tower"
    if "ears." in missing:
        assert model.ears.stage_name == "audio_tower"


def test_stage_name_does_not_depend_on_the_order_of_a_set():
    class Three(SupportsMultiModal, nn.Module):
        def __init__(self, modalities):
            super().__init__()
            with self._mark_tower_model(make_config(dict.fromkeys(modalities, 0)), modalities):
                self.tower = Tower()

    for modalities in (["video", "audio", "image"], ["image", "video", "audio"]):
        assert Three(dict.fromkeys(modalities).keys()).tower.stage_name == "audio_image_video_tower"
    with pytest.raises(ContractError, match="no modality"):
        Three(set())


def test_targets_are_found_at_any_depth():
    model = Composite(make_config())
    assert model._language_model_names == ["model.text"]
    assert model._tower_model_names == ["model.encoders.ears", "model.encoders.eyes"]
    assert model.get_language_model() is model.model.text


def test_targets_are_replaced_at_any_depth():
    model = Composite(make_config({"audio": 0}, encoder_only=True))
    assert model._language_model_names == ["model.text"]
    assert set(model._tower_model_names) == {"model.encoders.ears", "model.encoders.eyes"}
    assert stage_missing_prefixes(model) == ("model.text.", "model.encoders.ears.")
    assert model.model.text.stage_name == "language_model"
    assert model.model.encoders["ears"].stage_name == "audio_tower"
    assert set(model.state_dict()) == {"model.encoders.eyes.proj.weight", "model.encoders.eyes.proj.bias"}
    assert not any(p.is_meta for p in model.parameters())


def test_names_are_those_assigned_in_the_context_and_still_there():
    parent = nn.Module()
    parent.before = Tower()
    with collect_children(parent) as names:
        parent.a = Tower()
        parent.a = Tower()
        parent.add_module("b", Tower())
        parent.gone = Tower()
        del parent.gone
        parent.none = None
        parent.a.inner = Tower()
        other = nn.Module()
        other.c = Tower()
    parent.after = Tower()
    assert names == ["a", "b"]


def test_calling_what_is_left_out_names_the_stage():
    model = Model(make_config({"image": 0, "video": 0}, encoder_only=True))
    with pytest.raises(ContractError, match=r"'vision_tower'(.|\n)*fix: .*limit"):
        model.vision(torch.ones(1, 4))
    with pytest.raises(ContractError, match=r"'language_model'(.|\n)*fix: .*mm_encoder_only"):
        model.language_model.embed_input_ids(torch.tensor([1]))
    with pytest.raises(ContractError, match="'language_model'"):
        model.language_model.layers[0](torch.ones(1, 4))


def test_a_placeholder_can_be_read_copied_and_loaded_but_holds_nothing():
    placeholder = Model(make_config(encoder_only=True)).language_model
    assert (placeholder.width, placeholder.twice()) == (4, 8)
    assert hasattr(placeholder, "embed_input_ids") and not hasattr(placeholder, "absent")
    assert len(placeholder.layers) == 2
    for one in (placeholder, copy.deepcopy(placeholder), pickle.loads(pickle.dumps(placeholder))):
        assert [*one.parameters(), *one.buffers(), *one.children()] == [] and not one.state_dict()
        assert one.width == 4 and "language_model" in repr(one)
    assert all(t.is_meta for t in (*placeholder.original.parameters(), *placeholder.original.buffers()))
    assert placeholder.original.head.weight is not None
    weights = iter([("a", torch.ones(1)), ("b", torch.ones(1))])
    assert placeholder.load_weights(weights) == set() and next(weights, None) is None
    assert StageMissingLayer("alone").stage_name == "alone"


def test_post_load_work_of_the_original_is_not_found_on_a_placeholder():
    class Packs(nn.Module):
        def process_weights_after_loading(self):
            raise AssertionError("there are no weights")

    StageMissingLayer("language_model", Packs()).process_weights_after_loading()


def test_a_module_that_two_stages_share_keeps_its_weights():
    shared = Layer()

    class Shares(SupportsMultiModal, nn.Module):
        def __init__(self):
            super().__init__()
            with self._mark_tower_model(make_config(encoder_only=True), "image"):
                self.vision = nn.Sequential(shared)
            with self._mark_language_model(make_config(encoder_only=True)):
                self.language_model = nn.Sequential(shared)

    model = Shares()
    assert not any(t.is_meta for t in model.state_dict().values())
    x = torch.randn(2, 4)
    assert torch.equal(model.vision(x), shared(x))


def test_one_placeholder_under_two_names_has_two_prefixes():
    model = nn.Module()
    model.a = nn.ModuleList([StageMissingLayer("language_model")])
    model.b = model.a[0]
    assert stage_missing_prefixes(model) == ("a.0.", "b.")
    assert stage_missing_prefixes(model.b) == ("",)


@pytest.mark.parametrize("targets", [None, Tower])
def test_other_threads_and_what_follows_build_as_usual(targets):
    parent = nn.Module()
    elsewhere = nn.Module()

    def build():
        elsewhere.tower = Tower()
        parent.theirs = Tower()

    with (
        no_init_weights(parent, lambda m: StageMissingLayer("x", m), targets=targets),
        collect_children(parent) as names,
    ):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
        parent.ours = Tower()
    assert names == ["ours"] and isinstance(parent.ours, StageMissingLayer)
    for tower in (elsewhere.tower, parent.theirs):
        assert isinstance(tower, Tower) and not tower.proj.weight.is_meta
    parent.late = Tower()
    assert isinstance(parent.late, Tower) and not parent.late.proj.weight.is_meta


@pytest.mark.parametrize("targets", [None, Tower])
def test_an_exception_leaves_no_hook_behind(targets):
    hooks = (nn_module._global_module_registration_hooks, nn_module._global_parameter_registration_hooks)
    before = [len(h) for h in hooks]
    model = Model(make_config())
    config = make_config({"image": 0}, encoder_only=True)
    for mark in (
        lambda: model._mark_language_model(config, targets=targets),
        lambda: model._mark_tower_model(config, "image", targets=targets),
    ):
        with pytest.raises(RuntimeError, match="planted"), mark():
            raise RuntimeError("planted")
    assert [len(h) for h in hooks] == before


MEMORY = """
import weakref
import torch
from torch import nn
from torchplug.layers.stages import StageMissingLayer, no_init_weights

def resident():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["RssAnon"].split()[0]) // 1024

built = []

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(40))
        self.register_buffer("rope", torch.ones(2048, 2048))
        self.peak = resident()
        built.extend([weakref.ref(self), weakref.ref(self.rope)])

parent = nn.Module()
before = resident()
with no_init_weights(parent, lambda m: StageMissingLayer("language_model", m)):
    parent.language_model = Big()
print(parent.language_model.peak - before, [ref() for ref in built])
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_stage_that_is_left_out_takes_no_memory():
    """The 40 layers would take 640 MiB; the buffer (16 MiB) lives while the stage is built, and then goes too."""
    ran = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    peak, left = ran.stdout.split(maxsplit=1)
    assert int(peak) < 64, f"{peak} MiB while building"
    assert left.strip() == "[None, None]"
