"""The interfaces have the documented names, signatures and defaults, and guards that no trap deceives."""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import typing
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchplug import interfaces
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, MultiModalConfig, VllmConfig
from torchplug.errors import ContractError, TorchplugError

# Written down from the interface documentation, declarations only; where it leaves a result open there is no arrow.
DECLARED = """
class HasInnerState(Protocol):
    has_inner_state: ClassVar[Literal[True]] = True

class HasNoOps(Protocol):
    has_noops: ClassVar[Literal[True]] = True

class IsAttentionFree(Protocol):
    is_attention_free: ClassVar[Literal[True]] = True

class IsHybrid(Protocol):
    is_hybrid: ClassVar[Literal[True]] = True
    @classmethod
    def get_mamba_state_shape_from_config(
        cls, vllm_config: VllmConfig
    ) -> tuple[tuple[int, int], tuple[int, int, int]]: ...
    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]: ...

class MixtureOfExperts(Protocol):
    expert_weights: MutableSequence[Iterable[Tensor]]
    num_moe_layers: int
    num_expert_groups: int
    num_logical_experts: int
    num_physical_experts: int
    num_local_physical_experts: int
    num_routed_experts: int
    num_shared_experts: int
    num_redundant_experts: int
    moe_layers: Iterable[nn.Module]
    def set_eplb_state(
        self, expert_load_view: Tensor, logical_to_physical_map: Tensor, logical_replica_count: Tensor
    ) -> None: ...
    def update_physical_experts_metadata(
        self, num_physical_experts: int, num_local_physical_experts: int
    ) -> None: ...

class SupportsCrossEncoding(Protocol):
    supports_cross_encoding: ClassVar[Literal[True]] = True

class SupportsEagle(SupportsEagleBase, Protocol):
    supports_eagle: ClassVar[Literal[True]] = True

class SupportsEagle3(SupportsEagleBase, Protocol):
    supports_eagle3: ClassVar[Literal[True]] = True
    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None: ...
    def get_eagle3_aux_hidden_state_layers(self) -> tuple[int, ...]: ...

class SupportsEagleBase(Protocol):
    has_own_lm_head: bool = False
    has_own_embed_tokens: bool = False

class SupportsLoRA(Protocol):
    supports_lora: ClassVar[Literal[True]] = True
    is_3d_moe_weight: ClassVar[bool] = False
    is_non_gated_moe: ClassVar[bool] = False
    embedding_modules: ClassVar[dict[str, str]] = {}
    packed_modules_mapping: dict[str, list[str]] = {}

class SupportsMRoPE(Protocol):
    supports_mrope: ClassVar[Literal[True]] = True
    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[torch.Tensor, int]: ...

class SupportsMambaPrefixCaching(Protocol):
    supports_mamba_prefix_caching: ClassVar[Literal[True]] = True

class SupportsMultiModal(Protocol):
    supports_multimodal: ClassVar[Literal[True]] = True
    supports_multimodal_raw_input_only: ClassVar[bool] = False
    supports_encoder_tp_data: ClassVar[bool] = False
    requires_raw_input_tokens: ClassVar[bool] = False
    _processor_factory: ClassVar[_ProcessorFactories]
    _language_model_names: list[str] = []
    _tower_model_names: list[str] = []
    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None: ...
    def embed_multimodal(self, **kwargs: object) -> MultiModalEmbeddings: ...
    def get_language_model(self) -> VllmModel: ...
    def _mark_language_model(
        self,
        vllm_config: VllmConfig,
        *,
        targets: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    ): ...
    def _mark_tower_model(
        self,
        vllm_config: VllmConfig,
        modalities: set[str] | str,
        *,
        targets: type[nn.Module] | tuple[type[nn.Module], ...] | None = None,
    ): ...
    def _mark_composite_model(
        self,
        vllm_config: VllmConfig,
        *,
        language_targets: type[nn.Module] | tuple[type[nn.Module], ...],
        tower_targets: dict[str, type[nn.Module] | tuple[type[nn.Module], ...]],
    ): ...
    def get_num_mm_encoder_tokens(self, num_image_tokens: int) -> int: ...
    def get_num_mm_connector_tokens(self, num_vision_tokens: int) -> int: ...
    def _embed_text_input_ids(
        self,
        input_ids: Tensor,
        embed_input_ids: Callable[[Tensor], Tensor],
        *,
        is_multimodal: Tensor | None,
        handle_oov_mm_token: bool,
    ) -> Tensor: ...
    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: Tensor | None = None,
        handle_oov_mm_token: bool = False,
    ) -> Tensor: ...
"""
OVERLOADS = """
def embed_input_ids(self, input_ids: Tensor) -> Tensor: ...
def embed_input_ids(
    self,
    input_ids: Tensor,
    multimodal_embeddings: MultiModalEmbeddings,
    *,
    is_multimodal: torch.Tensor,
    handle_oov_mm_token: bool = False,
) -> Tensor: ...
"""
CLASSES = {node.name: node for node in ast.parse(DECLARED).body}
MACHINERY = {"__init__", "__init_subclass__", "__subclasshook__"}


def spelled(annotation) -> str:
    """An annotation in one spelling: quotes and line breaks do not count."""
    return ast.unparse(ast.parse(str(annotation).strip("'\""), mode="eval"))


def declared_parameters(node: ast.FunctionDef) -> list[tuple]:
    """(name, kind, default, annotation) of each parameter, as inspect names the kinds."""
    p, a = inspect.Parameter, node.args
    positional = [(arg, p.POSITIONAL_OR_KEYWORD) for arg in a.args]
    defaults = [None] * (len(a.args) - len(a.defaults)) + list(a.defaults)
    rows = [(*pair, default) for pair, default in zip(positional, defaults, strict=True)]
    rows += [(arg, p.KEYWORD_ONLY, default) for arg, default in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    rows += [(a.kwarg, p.VAR_KEYWORD, None)] if a.kwarg else []
    return [
        (
            arg.arg,
            kind,
            p.empty if default is None else ast.literal_eval(default),
            p.empty if arg.annotation is None else ast.unparse(arg.annotation),
        )
        for arg, kind, default in rows
    ]


def found_parameters(function) -> list[tuple]:
    return [
        (p.name, p.kind, p.default, p.annotation if p.annotation is p.empty else spelled(p.annotation))
        for p in inspect.signature(function, follow_wrapped=True).parameters.values()
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_protocol_is_declared_as_documented(name):
    declared, found = CLASSES[name], getattr(interfaces, name)
    assert [base.id for base in declared.bases] == [base.__name__ for base in found.__bases__]
    assert found._is_protocol and found._is_runtime_protocol and found.__doc__
    fields = [node for node in declared.body if isinstance(node, ast.AnnAssign)]
    annotations = inspect.get_annotations(found)
    assert {f.target.id: ast.unparse(f.annotation) for f in fields} == {k: spelled(v) for k, v in annotations.items()}
    defaults = {f.target.id: ast.literal_eval(f.value) for f in fields if f.value is not None}
    assert {key: vars(found).get(key) for key in defaults} == defaults
    methods = {node.name: node for node in declared.body if isinstance(node, ast.FunctionDef)}
    own = {key for key, value in vars(found).items() if callable(getattr(value, "__func__", value))}
    assert own - MACHINERY - {"_proto_hook"} == set(methods)
    for key, node in methods.items():
        raw = vars(found)[key]
        assert isinstance(raw, classmethod) == bool(node.decorator_list), key
        function = getattr(raw, "__func__", raw)
        assert found_parameters(function) == declared_parameters(node), key
        assert function.__doc__, key
        if node.returns is not None:
            assert spelled(inspect.signature(function).return_annotation) == ast.unparse(node.returns), key


def test_embed_input_ids_has_both_overloads():
    found = typing.get_overloads(interfaces.SupportsMultiModal.embed_input_ids)
    declared = ast.parse(OVERLOADS).body
    assert [found_parameters(f) for f in found] == [declared_parameters(node) for node in declared]


def test_documented_types_are_public():
    position = interfaces.PlaceholderRange(offset=3, length=2)
    feature = interfaces.MultiModalFeatureSpec(modality="image", mm_position=position, data={"grid": 1})
    assert (feature.modality, feature.mm_position.offset, feature.mm_position.length) == ("image", 3, 2)
    assert feature.mm_position.is_embed is None and feature.data == {"grid": 1}
    spec = interfaces.MambaCopySpec(start_addr=7, num_elements=9)
    assert (spec.start_addr, spec.num_elements) == (7, 9)
    for name in ("MultiModalEmbeddings", "MambaStateCopyFunc", "VllmModel"):
        assert hasattr(interfaces, name)


def test_placeholder_range_counts_and_compares_its_embedding_positions():
    some = interfaces.PlaceholderRange(1, 3, torch.tensor([True, False, True]))
    same = interfaces.PlaceholderRange(1, 3, torch.tensor([True, False, True]))
    other = interfaces.PlaceholderRange(1, 3, torch.tensor([True, True, True]))
    all_of_them = interfaces.PlaceholderRange(1, 3)
    assert (some.num_embeds, all_of_them.num_embeds) == (2, 3)
    assert some == same and hash(some) == hash(same)
    assert some != other and some != all_of_them and some != "range"
    for wrong in ((-1, 3), (0, -1), (0, 2, torch.tensor([True]))):
        with pytest.raises(ContractError, match="PlaceholderRange"):
            interfaces.PlaceholderRange(*wrong)


def interpreter(version: str) -> str | None:
    """A Python of this version: the running one, on PATH, or among pyenv's."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    if found := shutil.which(f"python{version}"):
        ran = subprocess.run([found, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
        if ran.stdout.strip() == str(tuple(map(int, version.split(".")))):  # a pyenv shim may stand for nothing
            return found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python"))
    return str(found[-1]) if found else None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_interfaces_give_the_same_answers_without_torch_on(version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    core = Path(interfaces.__file__).parents[2]
    script = Path(__file__).with_name("interfaces_on_any_python.py")
    ran = subprocess.run(
        [python, "-S", "-W", "error", str(script)],
        env={"PYTHONPATH": str(core), "PATH": os.defpath},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"checks passed on Python {version}" in ran.stdout


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_stubs_are_found_where_docstrings_are_stripped_on(version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    code = """
from torchplug import interfaces as i
for owner, name in (i.IsHybrid, "get_mamba_state_copy_func"), (i.SupportsMultiModal, "get_language_model"):
    print(i.is_stub(i.find_method(owner, name)[1], owner), i.find_method(owner, name)[1].__doc__)
"""
    ran = subprocess.run(
        [python, "-S", "-OO", "-c", code],
        env={"PYTHONPATH": str(Path(interfaces.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.splitlines() == ["True None", "False None"]


def test_interfaces_import_no_torch():
    code = "import sys, torchplug.interfaces; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


VALUES = st.sampled_from([True, False, 1, 0, "yes", None, "absent"])


@given(
    values=st.lists(VALUES, min_size=1, max_size=4),
    flag=st.sampled_from([r.flag for r in interfaces.INTERFACES.values() if r.flag]),
)
def test_the_first_class_with_the_flag_decides(values, flag):
    """A chain of classes, each with a value or none: the nearest value counts, and only the literal True claims."""
    cls = nn.Module
    for number, value in enumerate(reversed(values)):
        cls = type(f"C{number}", (cls,), {} if value == "absent" else {flag: value})
    given_values = [value for value in values if value != "absent"]
    expected = bool(given_values) and given_values[0] is True
    row = next(row for row in interfaces.INTERFACES.values() if row.flag == flag)
    for subject in (cls, cls()):
        assert getattr(interfaces, flag)(subject) is expected
        assert (row.name in interfaces.interfaces_of(subject)) is expected
        in_order = not given_values or given_values[0] is True or given_values[0] is False
        assert (interfaces.flag_problem(subject, flag) is None) is in_order


class Experts(nn.Module):
    pass


class Mixture(nn.Module):
    """Claims by attributes alone; its moe_layers is a ModuleList, which only nn.Module.__getattr__ finds."""

    def __init__(self):
        super().__init__()
        for name in interfaces.MOE_ATTRIBUTES:
            if name != "moe_layers":
                setattr(self, name, 1)
        self.moe_layers = nn.ModuleList([Experts()])


def test_experts_in_a_module_list_count():
    model = Mixture()
    assert "moe_layers" not in vars(model)
    assert interfaces.is_mixture_of_experts(model)
    assert not interfaces.is_mixture_of_experts(Mixture)
    del model.moe_layers
    assert interfaces.missing_moe_attributes(model) == ("moe_layers",)
    assert not interfaces.is_mixture_of_experts(model)


@pytest.mark.parametrize("name", [*interfaces.INTERFACES, "VllmModel", "MambaStateDtype"])
@pytest.mark.parametrize("first", [True, False])
def test_an_interface_and_a_module_make_a_model_in_either_order(name, first):
    protocol = getattr(interfaces, name)
    bases = (protocol, nn.Module) if first else (nn.Module, protocol)

    class Model(*bases):
        def __init__(self, *, vllm_config=None, prefix=""):
            super().__init__()
            self.layer = nn.Linear(2, 2)

    model = Model(prefix="model")
    assert [name for name, _ in model.named_parameters()] == ["layer.weight", "layer.bias"]
    assert len(copy.deepcopy(model).state_dict()) == 2


def make_config(**multimodal) -> VllmConfig:
    hf_config = HfConfig({}, source="test/config.json")
    model_config = ModelConfig("test", hf_config, torch.float32, 64, MultiModalConfig(**multimodal))
    return VllmConfig(model_config, DeviceConfig(torch.device("cpu")))


class Language(nn.Module):
    def __init__(self, vocab=10, hidden=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)

    def embed_input_ids(self, input_ids):
        return self.embed(input_ids)


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)


class Pictures(interfaces.SupportsMultiModal, nn.Module):
    def __init__(self, vllm_config):
        super().__init__()
        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.vision = Vision()
        with self._mark_language_model(vllm_config):
            self.language_model = Language()


def test_language_model_of_a_copy_is_the_copys_own():
    model = Pictures(make_config())
    assert model.get_language_model() is model.language_model
    twin = copy.deepcopy(model)
    assert twin.get_language_model() is twin.language_model is not model.language_model


def test_no_model_is_kept_alive_by_having_been_asked_for_its_language_model():
    model = Pictures(make_config())
    model.get_language_model()
    weights = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert [ref() for ref in weights] == [None] * len(weights)


def test_missing_language_model_is_one_clear_error():
    class Nothing(interfaces.SupportsMultiModal, nn.Module): ...

    with pytest.raises(TorchplugError, match=r"'Nothing'.*get_language_model(.|\n)*fix: ") as caught:
        Nothing().get_language_model()
    assert isinstance(caught.value, NotImplementedError)


def test_embed_input_ids_merges_at_the_mask():
    model = Pictures(make_config())
    ids = torch.tensor([1, 2, 3, 4])
    mask = torch.tensor([False, True, True, False])
    rows = [torch.full((1, 4), 5.0), torch.full((1, 4), 6.0)]
    text = model.language_model.embed(ids).detach()
    assert torch.equal(model.embed_input_ids(ids), text)
    assert torch.equal(model.embed_input_ids(ids, [], is_multimodal=mask), text)
    merged = model.embed_input_ids(ids, rows, is_multimodal=mask).detach()
    assert torch.equal(merged, torch.stack([text[0], rows[0][0], rows[1][0], text[3]]))
    with pytest.raises(ContractError, match="is_multimodal"):
        model.embed_input_ids(ids, rows)


def test_placeholder_ids_outside_the_vocabulary_are_looked_up_only_when_not_handled():
    """The documentation's words say the opposite of its code; the code leaves them out when the argument is True."""
    model = Pictures(make_config())
    ids = torch.tensor([1, 999, 3])
    mask = torch.tensor([False, True, False])
    kept = mask.clone()
    found = model.embed_input_ids(ids, [torch.ones(1, 4)], is_multimodal=mask, handle_oov_mm_token=True).detach()
    assert torch.equal(found[1], torch.ones(4))
    assert torch.equal(found[[0, 2]], model.language_model.embed(ids[[0, 2]]).detach())
    without = model.embed_input_ids(ids, None, is_multimodal=mask, handle_oov_mm_token=True).detach()
    assert torch.equal(without[1], torch.zeros(4)), "a row that nothing fills is zero, not whatever memory held"
    assert torch.equal(mask, kept) and mask.shape == (3,), "the caller's mask is the caller's"
    with pytest.raises(IndexError):
        model.embed_input_ids(ids, [torch.ones(1, 4)], is_multimodal=mask)


def test_every_guard_lives_in_the_public_module():
    module = importlib.import_module("torchplug.interfaces")
    for name in (
        *(row.flag for row in interfaces.INTERFACES.values() if row.flag),
        "is_mixture_of_experts",
        "supports_any_eagle",
        "supports_multimodal_raw_input_only",
        "supports_multimodal_encoder_tp_data",
        "requires_raw_input_tokens",
        "may_be_mixture_of_experts",
        "flag_problem",
        "find_method",
        "is_stub",
        "interfaces_of",
    ):
        assert callable(getattr(module, name)), name
