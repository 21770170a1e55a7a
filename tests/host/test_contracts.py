"""Checks of a model class: every problem at once, each with its place and its fix; and what is legal stays legal."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchplug import hookimpl, interfaces
from torchplug.errors import ContractError
from torchplug.host.contracts import inspect_class, location

SUBJECT = "plugin 'Test' (test 1.0)"


def problems_of(cls):
    with pytest.raises(ContractError) as raised:
        inspect_class(cls, subject=SUBJECT)
    return raised.value


def test_a_plain_class_in_vllms_conventions_needs_nothing_of_ours(plain_class):
    report = inspect_class(plain_class, subject=SUBJECT)
    assert report.interfaces == frozenset() and set(report.implementations) == {"embed_input_ids"}
    assert report.implementations["embed_input_ids"].lacking == (
        "multimodal_embeddings",
        "is_multimodal",
        "handle_oov_mm_token",
    )


def test_all_problems_come_at_once_and_name_file_line_and_fix():
    class Broken(interfaces.SupportsMRoPE, nn.Module):
        def __init__(self, config):
            super().__init__()

        def forward(self, input_ids):
            return input_ids

        def embed_input_ids(self, tokens):
            return tokens

    error = problems_of(Broken)
    text = str(error)
    assert len(error.problems) == 7 and text.startswith(f"torchplug: 7 problems in {SUBJECT}")
    for expected in (
        "does not take vllm_config",
        "does not take prefix",
        "takes (input_ids), expected (input_ids, positions, ...)",
        "compute_logits (class Broken",
        "load_weights (class Broken",
        "claims SupportsMRoPE but inherits the interface's empty method",
        "implement def get_mrope_input_positions(self, input_tokens, mm_features) -> (int64 tensor [3",
        "rename 'tokens' to 'input_ids'",
    ):
        assert expected in text, expected
    assert f"test_contracts.py:{Broken.forward.__code__.co_firstlineno})" in text


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_flag_that_is_not_a_literal_bool_is_an_error(plain_class, value):
    cls = type("Flag", (plain_class,), {"supports_mrope": value})
    assert "supports_mrope" in str(problems_of(cls)) and "write supports_mrope = True" in str(problems_of(cls))


def test_a_false_flag_claims_nothing(plain_class):
    cls = type("Flag", (plain_class, interfaces.SupportsMRoPE), {"supports_mrope": False})
    assert "SupportsMRoPE" not in inspect_class(cls, subject=SUBJECT).interfaces


def test_a_flag_without_its_method_is_an_error(plain_class):
    cls = type("Flag", (plain_class,), {"supports_mrope": True})
    assert "claims SupportsMRoPE but does not implement it" in str(problems_of(cls))


def test_a_method_without_its_flag_is_a_warning(plain_class):
    class Method(plain_class):
        def get_mrope_input_positions(self, input_tokens, mm_features): ...

    class Real(plain_class):
        def get_mrope_input_positions(self, input_tokens, mm_features):
            return torch.arange(len(input_tokens)).expand(3, -1), 0

    (warning,) = inspect_class(Real, subject=SUBJECT).warnings
    assert "does not claim SupportsMRoPE" in warning.says and "supports_mrope = True" in warning.fix
    assert inspect_class(plain_class, subject=SUBJECT).warnings == ()


def test_a_flag_on_the_instance_is_an_error(bind, plain_class):
    class Late(plain_class):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.supports_mrope = True

    with pytest.raises(ContractError, match="supports_mrope is set on the instance"):
        bind(Late)


def mrope(plain_class, source):
    scope = {"hookimpl": hookimpl}
    exec(source, scope)
    return type("M", (plain_class, interfaces.SupportsMRoPE), {"get_mrope_input_positions": scope["f"]})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("async def f(self, input_tokens, mm_features): pass", "is async"),
        ("def f(self, input_tokens, mm_features): yield 1", "is a generator"),
        ("def f(self, input_tokens): return 1", "does not take 'mm_features'"),
        (
            "def f(self, input_tokens, mm_features, extra): return 1",
            "takes 'extra', which the hook does not have, so it would never",
        ),
        ("def f(self, input_tokens, mm_feature=None): return 1", "rename 'mm_feature' to 'mm_features'"),
        ("def f(): return 1", "takes no self"),
        ("f = hookimpl(tryfirst=True)(lambda self, input_tokens, mm_features: 1)", "marked with hookimpl(tryfirst)"),
        ("f = hookimpl(wrapper=True)(lambda self, input_tokens, mm_features: 1)", "marked with hookimpl(wrapper)"),
    ],
)
def test_a_method_that_cannot_be_called_as_the_hook_is_an_error(plain_class, source, message):
    assert message in str(problems_of(mrope(plain_class, source)))


@pytest.mark.parametrize(
    "source",
    [
        "def f(self, input_tokens, mm_features): return 1",
        "def f(self, input_tokens, *, mm_features): return 1",
        "def f(self, mm_features, input_tokens): return 1",
        "def f(self, *args): return 1",
        "def f(self, **kwargs): return 1",
        "def f(self, input_tokens, mm_features, verbose=False): return 1",
        "f = hookimpl(lambda self, input_tokens, mm_features: 1)",
    ],
)
def test_a_method_that_can_be_called_as_the_hook_is_accepted(plain_class, source):
    assert "get_mrope_input_positions" in inspect_class(mrope(plain_class, source), subject=SUBJECT).implementations


def test_arguments_in_another_order_still_arrive_by_name(bind, plain_class):
    class Swapped(plain_class, interfaces.SupportsMRoPE):
        def get_mrope_input_positions(self, mm_features, input_tokens):
            return torch.arange(len(input_tokens)).expand(3, -1), len(mm_features)

    positions, delta = bind(Swapped).hooks.get_mrope_input_positions([1, 2, 3], ["x"])
    assert positions.shape == (3, 3) and delta == 1


def test_a_class_phase_hook_must_not_need_an_instance(plain_class):
    class Instance(plain_class, interfaces.HasInnerState):
        def get_mamba_state_shape_from_config(self, vllm_config):
            return ((1,),)

    assert "put @classmethod above def get_mamba_state_shape_from_config(cls, vllm_config)" in str(
        problems_of(Instance)
    )


def test_a_marked_method_with_an_unknown_name_gets_a_suggestion(plain_class):
    class Typo(plain_class):
        @hookimpl
        def embed_input_id(self, input_ids):
            return input_ids

    assert "did you mean embed_input_ids?" in str(problems_of(Typo))


def test_the_raw_input_flag_lifts_the_need_for_embed_multimodal(plain_class):
    methods = {
        "get_placeholder_str": classmethod(lambda cls, modality, i: None),
        "get_language_model": lambda self: self,
    }
    cls = type("Raw", (plain_class, interfaces.SupportsMultiModal), methods)
    assert "embed_multimodal" in str(problems_of(cls))
    raw = type("Raw", (cls,), {"supports_multimodal_raw_input_only": True})
    assert "embed_multimodal" not in inspect_class(raw, subject=SUBJECT).implementations


def test_an_entry_point_that_is_no_class_is_an_error():
    assert "expected a class that derives from torch.nn.Module" in str(problems_of(lambda: None))
    assert "does not derive from torch.nn.Module" in str(problems_of(int))


def test_a_partial_mixture_of_experts_names_what_it_lacks(bind, plain_class):
    class Partial(plain_class, interfaces.MixtureOfExperts):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.num_moe_layers = 1

        def update_physical_experts_metadata(self, num_physical_experts, num_local_physical_experts):
            self.num_physical_experts = num_physical_experts

    with pytest.raises(ContractError, match=r"lacks expert_weights, .*moe_layers"):
        bind(Partial)


def test_location_is_relative_to_the_package(plain_class):
    assert location(inspect_class).startswith("torchplug/host/contracts.py:")
    assert location(len) == "no Python source"


@pytest.mark.parametrize("mark", ["supports_cross_encoding", "is_pooling_model"])
def test_a_pooling_model_needs_no_head(plain_class, mark):
    class Headless(nn.Module):
        __init__, forward, load_weights = plain_class.__init__, plain_class.forward, plain_class.load_weights
        embed_input_ids = plain_class.embed_input_ids

    assert "compute_logits" in str(problems_of(Headless))
    inspect_class(type("Scores", (Headless,), {mark: True}), subject=SUBJECT)
