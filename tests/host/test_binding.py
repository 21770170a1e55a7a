"""`model.hooks`: the interface's own signature, the author's method behind it, placement, checks, reasons, wrappers."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
import torchplug
from torch import nn
from torchplug import interfaces
from torchplug.errors import ContractError, HookNotProvided
from torchplug.hookspecs import HOOKS, TABLE, Phase
from torchplug.host.binding import Binding
from torchplug.host.contracts import inspect_class
from torchplug.host.model import ModelClass
from torchplug.results import Facts


@pytest.fixture
def everything(plain_class):
    """A class that claims all interfaces and gives every hook back what it was given."""

    class Everything(
        plain_class,
        interfaces.SupportsMultiModal,
        interfaces.SupportsMRoPE,
        interfaces.SupportsEagle3,
        interfaces.SupportsMambaPrefixCaching,
        interfaces.HasInnerState,
        interfaces.IsHybrid,
        interfaces.MixtureOfExperts,
    ):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.seen = {}
            self.expert_weights, self.moe_layers = [], nn.ModuleList()
            self.num_moe_layers = self.num_expert_groups = self.num_local_physical_experts = 1
            self.num_logical_experts = self.num_physical_experts = self.num_routed_experts = 1
            self.num_shared_experts = self.num_redundant_experts = 0

        @classmethod
        def get_mamba_state_shape_from_config(cls, vllm_config):
            return ((3, 4), (vllm_config, 4, 5))

        @classmethod
        def get_mamba_state_dtype_from_config(cls, vllm_config):
            return (torch.float32, torch.bfloat16)

        @staticmethod
        def get_mamba_state_copy_func():
            return (print,)

        @classmethod
        def get_placeholder_str(cls, modality, i):
            return f"<{modality}{i}>" if modality == "image" else None

        def get_language_model(self):
            return self.head

        def get_num_mm_encoder_tokens(self, num_image_tokens):
            return num_image_tokens * 4

        def get_num_mm_connector_tokens(self, num_vision_tokens):
            return num_vision_tokens // 4

        def set_eplb_state(self, expert_load_view, logical_to_physical_map, logical_replica_count):
            self.seen["eplb"] = (expert_load_view, logical_to_physical_map, logical_replica_count)

        def update_physical_experts_metadata(self, num_physical_experts, num_local_physical_experts):
            self.seen["physical"] = (num_physical_experts, num_local_physical_experts)

        def set_aux_hidden_state_layers(self, layers):
            self.seen["layers"] = layers

        def get_eagle3_aux_hidden_state_layers(self):
            return self.seen["layers"]

        def get_mrope_input_positions(self, input_tokens, mm_features):
            return torch.arange(len(input_tokens)).expand(3, -1), len(mm_features)

        def embed_multimodal(self, **kwargs):
            self.seen["multimodal"] = kwargs
            return [torch.ones(2, 8)]

        def embed_input_ids(
            self, input_ids, multimodal_embeddings=None, *, is_multimodal=None, handle_oov_mm_token=False
        ):
            self.seen["embed"] = (input_ids, multimodal_embeddings, is_multimodal, handle_oov_mm_token)
            return self.embed(input_ids)

    return Everything


@pytest.fixture
def model(bind, everything):
    return bind(everything)


def call_all(hooks):
    """Call every hook of the table with a distinct argument in every place."""
    ids, mask = torch.tensor([1, 2]), torch.tensor([False, True])
    views = [torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int64), torch.full((1,), 2)]
    return {
        "get_mamba_state_shape_from_config": hooks.get_mamba_state_shape_from_config(7),
        "get_mamba_state_dtype_from_config": hooks.get_mamba_state_dtype_from_config(7),
        "get_mamba_state_copy_func": hooks.get_mamba_state_copy_func(),
        "get_placeholder_str": [
            hooks.get_placeholder_str("image", 3),
            hooks.get_placeholder_str(modality="audio", i=1),
        ],
        "get_language_model": hooks.get_language_model(),
        "get_num_mm_encoder_tokens": hooks.get_num_mm_encoder_tokens(5),
        "get_num_mm_connector_tokens": hooks.get_num_mm_connector_tokens(num_vision_tokens=8),
        "set_eplb_state": (hooks.set_eplb_state(*views), views)[1],
        "update_physical_experts_metadata": hooks.update_physical_experts_metadata(8, num_local_physical_experts=4),
        "set_aux_hidden_state_layers": hooks.set_aux_hidden_state_layers((1, 4)),
        "get_eagle3_aux_hidden_state_layers": hooks.get_eagle3_aux_hidden_state_layers(),
        "get_mrope_input_positions": hooks.get_mrope_input_positions([1, 2, 3], mm_features=["a", "b"]),
        "embed_multimodal": hooks.embed_multimodal(pixel_values=torch.ones(3), grid=[1, 2]),
        "embed_input_ids": hooks.embed_input_ids(ids, [torch.ones(1, 8)], is_multimodal=mask, handle_oov_mm_token=True),
    }


def check_all(model, results):
    seen = model.module.seen
    assert set(results) == set(HOOKS), "every hook of the table is called"
    assert results["get_mamba_state_shape_from_config"] == ((3, 4), (7, 4, 5))
    assert results["get_mamba_state_dtype_from_config"] == (torch.float32, torch.bfloat16)
    assert results["get_mamba_state_copy_func"] == (print,)
    assert results["get_placeholder_str"] == ["<image3>", None]
    assert results["get_language_model"] is model.module.head
    assert (results["get_num_mm_encoder_tokens"], results["get_num_mm_connector_tokens"]) == (20, 2)
    assert all(given is kept for given, kept in zip(results["set_eplb_state"], seen["eplb"], strict=True))
    assert seen["physical"] == (8, 4)
    assert results["get_eagle3_aux_hidden_state_layers"] == (1, 4)
    assert results["get_mrope_input_positions"][0].shape == (3, 3) and results["get_mrope_input_positions"][1] == 2
    assert set(seen["multimodal"]) == {"pixel_values", "grid"} and seen["multimodal"]["grid"] == [1, 2]
    ids, embeddings, mask, oov = seen["embed"]
    assert ids.tolist() == [1, 2] and embeddings[0].shape == (1, 8) and mask.tolist() == [False, True] and oov is True


def test_every_hook_reaches_the_authors_method_with_every_argument(model):
    check_all(model, call_all(model.hooks))


def test_every_hook_reaches_the_authors_method_through_wrappers(model):
    calls = []
    plugin = torchplug.observer(
        before=lambda hook, model, arguments: calls.append((hook, model, dict(arguments))),
        after=lambda hook, model, arguments, result: calls.append((hook, "after")),
    )
    with model.attached(plugin):
        check_all(model, call_all(model.hooks))
    assert {call[0] for call in calls} == set(HOOKS)
    assert all(call[1] is model.module for call in calls if call[1] != "after")
    count = len(calls)
    call_all(model.hooks)
    assert len(calls) == count, "a detached wrapper sees nothing"


@pytest.mark.parametrize("hook", TABLE, ids=lambda hook: hook.name)
def test_a_bound_hook_has_the_interfaces_exact_signature(model, hook):
    function = getattr(hook.of, "__func__", hook.of)
    expected = inspect.signature(function)
    expected = expected.replace(parameters=list(expected.parameters.values())[1:])
    assert inspect.signature(getattr(model.hooks, hook.name)) == expected
    generated = inspect.signature(getattr(model.hooks, hook.name), follow_wrapped=False)
    assert [(p.name, p.kind, p.default) for p in generated.parameters.values()] == [
        (p.name, p.kind, p.default) for p in expected.parameters.values()
    ]
    with pytest.raises(TypeError):
        getattr(model.hooks, hook.name)(1, 2, 3, 4, 5)


def test_a_class_handle_has_the_class_phase_hooks_only(everything):
    handle = ModelClass(everything, inspect_class(everything, subject="plugin"), None)
    assert dir(handle.hooks) == sorted(hook.name for hook in TABLE if hook.phase is Phase.CLASS)
    assert handle.hooks.get_placeholder_str("image", 1) == "<image1>"
    with pytest.raises(HookNotProvided, match="embed_input_ids: is a step-phase hook and needs a loaded model"):
        handle.hooks.embed_input_ids(torch.tensor([1]))


def test_an_absent_hook_says_why(bind, plain_class):
    hooks = bind(plain_class).hooks
    assert dir(hooks) == ["embed_input_ids"]
    with pytest.raises(HookNotProvided, match="get_mrope_input_positions: Plain does not claim SupportsMRoPE"):
        hooks.get_mrope_input_positions([1], [])
    with pytest.raises(HookNotProvided, match="no such hook"):
        hooks.embed_inputs
    assert not hasattr(hooks, "embed_multimodal"), "HookNotProvided is an AttributeError"


def test_an_optional_hook_that_is_absent_says_so(bind, plain_class):
    class Recurrent(plain_class, interfaces.HasInnerState):
        @classmethod
        def get_mamba_state_shape_from_config(cls, vllm_config):
            return ((1, 2),)

    with pytest.raises(HookNotProvided, match="Recurrent does not implement it"):
        bind(Recurrent).hooks.get_mamba_state_dtype_from_config(None)


def test_an_argument_that_the_method_lacks_may_only_be_its_default(bind, plain_class):
    hooks = bind(plain_class).hooks
    ids = torch.tensor([3])
    assert hooks.embed_input_ids(ids, None, is_multimodal=None, handle_oov_mm_token=False).shape == (1, 8)
    with pytest.raises(ContractError, match=r"handle_oov_mm_token=bool True was passed, and the method does not take"):
        hooks.embed_input_ids(ids, handle_oov_mm_token=True)


@pytest.mark.parametrize(
    ("name", "arguments", "result", "found"),
    [
        ("embed_input_ids", ([1],), torch.ones(1), r"float32\[1\] on cpu"),
        ("embed_input_ids", ([1],), torch.ones(1, 8, dtype=torch.float64), "float64"),
        ("embed_input_ids", ([1],), torch.ones(1, 8, device="meta"), "on meta"),
        ("embed_input_ids", ([1],), None, "found None"),
        ("embed_multimodal", (), [torch.ones(2, 8), torch.ones(2)], r"float32\[2\] on cpu for item 1"),
        ("embed_multimodal", (), None, "found None"),
        ("get_mrope_input_positions", ([1], []), (torch.ones(3, 1), 0), "float32"),
        ("get_mrope_input_positions", ([1], []), (torch.ones(2, 1).long(), 0), r"int64\[2, 1\]"),
        ("get_mrope_input_positions", ([1], []), (torch.ones(3, 1).long(), torch.tensor(0)), r"int64\[\]"),
        ("get_placeholder_str", ("image", 1), 5, "int 5"),
        ("get_language_model", (), "text", "str 'text'"),
        ("get_num_mm_encoder_tokens", (1,), 2.0, "float 2.0"),
        ("set_eplb_state", (torch.ones(1),) * 3, 1, "int 1"),
        ("get_eagle3_aux_hidden_state_layers", (), (2, 1), "tuple"),
        ("get_mamba_state_shape_from_config", (None,), ((3, 0),), "for state 0"),
        ("get_mamba_state_dtype_from_config", (None,), ("float32",), "float32"),
        ("get_mamba_state_copy_func", (), (1,), "int 1"),
    ],
)
def test_a_wrong_result_is_named_with_hook_plugin_and_fix(bind, everything, name, arguments, result, found):
    kind = classmethod if HOOKS[name].phase is Phase.CLASS else lambda function: function
    takes_keywords = name == "embed_multimodal"
    function = (
        (lambda self, **kwargs: result)
        if takes_keywords
        else eval(
            f"lambda self{''.join(f', {p}' for p in list(HOOKS[name].signature.parameters)[: len(arguments)])}: result",
            {"result": result},
        )
    )
    cls = type("Wrong", (everything,), {name: kind(function)})
    arguments = [torch.tensor(a) if name == "embed_input_ids" else a for a in arguments]
    model = bind(cls)
    for wrapped in (False, True):
        if wrapped:
            model.attach(torchplug.observer())
        with pytest.raises(ContractError, match=found) as raised:
            getattr(model.hooks, name)(*arguments)
        assert "plugin 'Test' (test 1.0)" in str(raised.value) and f"return {HOOKS[name].returns.says}" in str(
            raised.value
        )


def test_tensors_in_the_wrong_place_are_named_with_both_devices(model):
    ids = torch.tensor([1, 2])
    with pytest.raises(ContractError, match="input_ids: is on meta, the model on cpu"):
        model.hooks.embed_input_ids(ids.to("meta"))
    with pytest.raises(ContractError, match=r"multimodal_embeddings\[1\]: is on meta"):
        model.hooks.embed_input_ids(ids, [torch.ones(1, 8), torch.ones(1, 8, device="meta")], is_multimodal=ids > 1)
    with pytest.raises(ContractError, match=r"kwargs\['pixel_values'\]: is on meta"):
        model.hooks.embed_multimodal(pixel_values=torch.ones(1, device="meta"))
    with pytest.raises(ContractError, match="logical_replica_count: is on meta; a view is shared for life"):
        model.hooks.set_eplb_state(torch.ones(1), torch.ones(1), torch.ones(1, device="meta"))
    with pytest.raises(ContractError, match=r"input_ids: expected a tensor, found list of \(int 1, int 2\)"):
        model.hooks.embed_input_ids([1, 2])
    with model.attached(torchplug.observer()), pytest.raises(ContractError, match="input_ids: is on meta"):
        model.hooks.embed_input_ids(ids.to("meta"))


def test_what_is_in_place_arrives_as_the_very_object_that_was_given_and_none_where_a_tensor_must_be_does_not(model):
    ids, rows, mask = torch.tensor([1, 2]), [torch.ones(1, 8)], torch.tensor([False, True])
    views = [torch.zeros(1), torch.ones(1), torch.full((1,), 2)]
    grid = {"sizes": (torch.ones(1), 3)}
    for wrapper in (None, torchplug.observer()):
        if wrapper is not None:
            model.attach(wrapper)
        model.hooks.embed_input_ids(ids, rows, is_multimodal=mask)
        assert all(seen is given for seen, given in zip(model.module.seen["embed"], (ids, rows, mask), strict=False))
        model.hooks.embed_multimodal(grid=grid)
        assert model.module.seen["multimodal"]["grid"] is grid
        for missing in range(3):
            given = [None if index == missing else view for index, view in enumerate(views)]
            with pytest.raises(ContractError, match="expected a tensor, found None"):
                model.hooks.set_eplb_state(*given)
        with pytest.raises(ContractError, match="input_ids: expected a tensor, found None"):
            model.hooks.embed_input_ids(None)
        model.hooks.embed_input_ids(ids, None, is_multimodal=None)


def test_a_cpu_tensor_is_moved_to_the_models_device_and_a_view_is_not(everything, vllm_config):
    """`meta` stands for an accelerator: it is another device than the CPU on every machine."""
    report = inspect_class(everything, subject="plugin")
    module = everything(vllm_config=vllm_config).to("meta")
    facts = Facts(torch.device("meta"), torch.float32)
    hooks = Binding(
        module, report, phases=tuple(Phase), claimed=report.interfaces | {"MixtureOfExperts"}, facts=facts
    ).hooks
    hooks.embed_input_ids(torch.tensor([1]), is_multimodal=torch.tensor([True]))
    assert module.seen["embed"][0].is_meta and module.seen["embed"][2].is_meta
    with pytest.raises(ContractError, match="expert_load_view: is on cpu; a view"):
        hooks.set_eplb_state(torch.ones(1), torch.ones(1), torch.ones(1))
    view = torch.ones(1, device="meta")
    hooks.set_eplb_state(view, view, view)
    assert module.seen["eplb"][0] is view


def test_an_exception_is_noted_once_where_it_started(bind, everything):
    class Raises(everything):
        def get_language_model(self):
            raise KeyError("gone")

    model = bind(Raises)
    for _ in range(3):
        with pytest.raises(KeyError) as raised:
            model.hooks.get_language_model()
        (note,) = raised.value.__notes__
        assert "get_language_model (" in note and "test_binding.py" in note and "plugin 'Test' (test 1.0)" in note
        model.attach(torchplug.observer(after=lambda *_: None))


def test_a_wrapper_changes_a_result_and_is_blamed_for_a_wrong_one(model):
    class Scale:
        @torchplug.hookimpl(wrapper=True)
        def get_num_mm_encoder_tokens(self, num_image_tokens):
            result = yield
            return result + num_image_tokens

    class Forgets:
        @torchplug.hookimpl(wrapper=True)
        def get_num_mm_encoder_tokens(self):
            yield

    class Raises:
        @torchplug.hookimpl(wrapper=True)
        def get_num_mm_encoder_tokens(self, model):
            raise ValueError("mine")
            yield

    with model.attached(Scale()):
        assert model.hooks.get_num_mm_encoder_tokens(5) == 25
        with model.attached(Forgets()), pytest.raises(ContractError) as raised:
            model.hooks.get_num_mm_encoder_tokens(5)
        assert "wrapper plugin 'Forgets'" in str(raised.value) and "end with `return result`" in str(raised.value)
        with model.attached(Raises()), pytest.raises(ValueError, match="mine") as failed:
            model.hooks.get_num_mm_encoder_tokens(5)
        assert "wrapper plugin 'Raises'" in failed.value.__notes__[0]
    assert model.hooks.get_num_mm_encoder_tokens(5) == 20


def test_the_last_attached_wrapper_is_the_outermost(model):
    order = []

    def make(name):
        return torchplug.observer(before=lambda *_: order.append(name))

    inner, outer = make("inner"), make("outer")
    model.attach(inner)
    model.attach(outer)
    model.hooks.get_language_model()
    assert order == ["outer", "inner"]
    with pytest.raises(ContractError, match="already attached"):
        model.attach(inner)
    model.detach(inner)
    model.detach(outer)
    with pytest.raises(ContractError, match="is not attached"):
        model.detach(outer)


def wrapper_class(source):
    scope = {"hookimpl": torchplug.hookimpl}
    exec(source, scope)
    return scope["W"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@hookimpl\n    def embed_input_ids(self): return 1", "is a plain implementation"),
        ("@hookimpl(hookwrapper=True)\n    def embed_input_ids(self): yield", "old-style hookwrapper"),
        ("@hookimpl(wrapper=True, tryfirst=True)\n    def embed_input_ids(self): yield", "sets tryfirst"),
        ("@hookimpl(wrapper=True, trylast=True)\n    def embed_input_ids(self): yield", "sets trylast"),
        ("@hookimpl(wrapper=True)\n    def embed_inputs_ids(self): yield", "did you mean embed_input_ids"),
        ("@hookimpl(wrapper=True)\n    def embed_input_ids(self): return 1", "is not a generator function"),
        (
            "@hookimpl(wrapper=True)\n    def embed_input_ids(self, input_idz): yield",
            "rename 'input_idz' to 'input_ids'",
        ),
        (
            "@hookimpl(wrapper=True)\n    def embed_input_ids(self, *, input_ids): yield",
            "takes 'input_ids' by keyword only",
        ),
        ("def embed_input_ids(self): yield", "has no function marked"),
    ],
)
def test_a_wrapper_that_is_not_one_is_refused_with_the_fix(model, body, message):
    cls = wrapper_class(f"class W:\n    {body}")
    with pytest.raises(ContractError, match=message):
        model.attach(cls())
    assert model.hooks.embed_input_ids(torch.tensor([1])).shape == (1, 8), "nothing was attached"


def test_a_class_instead_of_an_instance_is_refused(model):
    cls = wrapper_class("class W:\n    @hookimpl(wrapper=True)\n    def embed_input_ids(self): yield")
    with pytest.raises(ContractError, match=r"name an instance of it: W\(\)"):
        model.attach(cls)


def test_weights_go_with_the_last_reference_without_the_garbage_collector(bind, everything):
    model = bind(everything)
    model.attach(torchplug.observer())
    model.hooks.get_language_model()
    weight = weakref.ref(model.module.embed.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_closing_detaches_and_frees(bind, everything):
    model = bind(everything)
    model.attach(torchplug.observer())
    weight = weakref.ref(model.module.embed.weight)
    hooks = model.hooks
    model.close()
    assert weight() is None
    with pytest.raises(HookNotProvided, match="the model is closed"):
        hooks.embed_input_ids


def test_an_older_spelling_is_called_or_refused_by_name(bind, everything, plain_class):
    class Older(plain_class, interfaces.SupportsEagle3):
        def set_aux_hidden_state_layers(self, layers):
            return None

        def get_eagle3_default_aux_hidden_state_layers(self):
            return (2, 5)

    assert bind(Older).hooks.get_eagle3_aux_hidden_state_layers() == (2, 5)

    class Renamed(plain_class, interfaces.SupportsMambaPrefixCaching):
        def get_mamba_state_copy_funcs(self, kinds):
            return {}

    with pytest.raises(ContractError, match=r"get_mamba_state_copy_funcs \(.*spelling of another vLLM version"):
        bind(Renamed)
