"""What a class says of its layers and their state, against the layers that it builds: every difference is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
from torchplug.errors import ContractError
from torchplug.host.contracts import inspect_class
from torchplug.host.model import ModelClass
from torchplug.host.recurrent_layers import (
    ALL_SIZES,
    check_recurrent_layers,
    copy_functions,
    declared_state,
    kind_problems,
    state_problems,
)
from torchplug.layers import Attention, RecurrentLayer

HYBRID = frozenset({"HasInnerState", "IsHybrid"})
FREE = frozenset({"HasInnerState", "IsAttentionFree"})


class Layer(RecurrentLayer):
    def __init__(self, shapes=((3, 8),), dtypes=(torch.float32,)):
        super().__init__()
        self.shapes, self.dtypes = shapes, dtypes

    def state_shapes(self):
        return self.shapes

    def state_dtypes(self):
        return self.dtypes


def config_of(**values) -> VllmConfig:
    view = HfConfig(values, source="config.json")
    return VllmConfig(ModelConfig("x", view, torch.float32, 64), DeviceConfig(torch.device("cpu")))


def module_of(kinds: str) -> nn.Module:
    return nn.ModuleList(Attention(2, 4, 1.0) if kind == "a" else Layer() for kind in kinds)


def texts(claimed, kinds, **values):
    return [
        f"{problem.where}: {problem.says}"
        for problem in kind_problems(claimed, nn.ModuleList, module_of(kinds), config_of(**values))
    ]


@pytest.mark.parametrize(
    ("claimed", "kinds", "values"),
    [
        (HYBRID, "ra", {}),
        (HYBRID, "rra", {"layers_block_type": ["mamba", "mamba", "attention"]}),
        (HYBRID, "ar", {"layer_types": ["full_attention", "conv"]}),
        (HYBRID, "ar", {"attn_type_list": [1, 0]}),
        (HYBRID, "aar", {"layer_types": ["full_attention", "sliding_attention", "linear_attention"]}),
        (HYBRID, "rar", {"layers_block_type": ["mamba", "hybrid"]}),  # a hybrid block has one of each
        (HYBRID, "ra", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
        (HYBRID, "ra", {"layer_types": ["griffin", "full_attention"]}),  # a name that only the author knows
        (HYBRID, "aa", {"layer_types": ["full_attention", "full_attention"]}),
        (HYBRID, "ra", {"text_config": {"layer_types": ["mamba", "attention"]}}),
        (HYBRID, "", {"layer_types": ["mamba", "attention"]}),  # layers of the author's own: nothing is kept
        (FREE, "rr", {}),
        (frozenset(), "aa", {"layer_types": ["full_attention"]}),
    ],
)
def test_what_agrees_is_no_problem(claimed, kinds, values):
    assert texts(claimed, kinds, **values) == []


@pytest.mark.parametrize(
    ("claimed", "kinds", "values", "where", "says"),
    [
        (HYBRID, "rr", {}, "is_hybrid", "claims IsHybrid and builds no Attention layers and 2 recurrent layers"),
        (HYBRID, "aa", {}, "is_hybrid", "claims IsHybrid and builds 2 Attention layers and no recurrent layers"),
        (
            HYBRID,
            "ra",
            {"layer_types": ["mamba"] * 2},
            "is_hybrid",
            "layer_types of the config names 0 of 2 layers attention",
        ),
        (
            HYBRID,
            "r",
            {"attn_type_list": [1, 0]},
            "is_hybrid",
            "attn_type_list of the config names 1 of 2 layers attention",
        ),
        (HYBRID, "a", {"layers_block_type": ["mamba", "attention"]}, "is_hybrid", "names 1 of 2 layers recurrent"),
        (HYBRID, "rra", {"layer_types": ["x", "attention"]}, "is_hybrid", "names 0 to 1 of 2 layers recurrent"),
        (FREE, "ra", {}, "is_attention_free", "builds 1 Attention layer and 1 recurrent layer"),
        (FREE - {"IsAttentionFree"}, "r", {}, "is_attention_free", "claims HasInnerState alone"),
        (FREE - {"IsAttentionFree"}, "a", {}, "has_inner_state", "builds 1 Attention layer and no recurrent layers"),
        (frozenset(), "r", {}, "has_inner_state", "claims neither HasInnerState nor IsHybrid"),
        (frozenset({"HasInnerState"}), "ra", {}, "is_hybrid", "does not claim IsHybrid"),
    ],
)
def test_what_differs_is_named(claimed, kinds, values, where, says):
    found = texts(claimed, kinds, **values)
    assert any(text.startswith(where) and says in text for text in found), found


# -- states -------------------------------------------------------------------------------------------------------


def class_of(hook, layers, *, dtypes=None, **body) -> ModelClass:
    """A class whose hook gives `hook(tp, drafts)` and whose layers are `layers(tp, drafts)`."""

    def sizes(vllm_config):
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else speculative.num_speculative_tokens
        return vllm_config.parallel_config.tensor_parallel_size, drafts

    class Model(nn.Module):
        has_inner_state = True
        is_attention_free = True

        def __init__(self, *, vllm_config, prefix=""):
            super().__init__()
            self.mixers = nn.ModuleList(layers(*sizes(vllm_config)))

        @classmethod
        def get_mamba_state_shape_from_config(cls, vllm_config):
            return hook(*sizes(vllm_config))

        def embed_input_ids(self, input_ids):
            return input_ids

        def forward(self, input_ids, positions):
            return input_ids

        def compute_logits(self, hidden_states):
            return hidden_states

        def load_weights(self, weights):
            return set()

    for name, value in body.items():
        setattr(Model, name, value)
    if dtypes is not None:
        Model.get_mamba_state_dtype_from_config = classmethod(lambda cls, vllm_config: dtypes)
    return ModelClass(Model, inspect_class(Model, subject="plugin 'X'"), None)


def problems_of(handle: ModelClass, sizes=ALL_SIZES, config=None) -> list[str]:
    config = config or config_of()
    module = handle.cls(vllm_config=config)
    found = state_problems(handle, handle.cls, module, config, "plugin 'X'", sizes)
    return [f"{problem.where}: {problem.says}; {problem.fix}" for problem in found]


def right(tp, drafts):
    return ((3 + drafts, 24 // tp), (24 // tp,))


def layers_of(shapes, dtypes=(torch.float32, torch.float32)):
    return lambda tp, drafts: [Layer(shapes(tp, drafts), dtypes), Layer(shapes(tp, drafts), dtypes)]


def test_a_class_that_says_what_its_layers_keep_has_no_problem():
    assert problems_of(class_of(right, layers_of(right))) == []


@pytest.mark.parametrize(
    ("hook", "sizes"),
    [
        (lambda tp, drafts: ((3, 24 // tp), (24 // tp,)), "tensor-parallel size 1, 1 draft tokens"),
        (lambda tp, drafts: ((3 + drafts, 24), (24 // tp,)), "tensor-parallel size 2, 0 draft tokens"),
        (lambda tp, drafts: ((3 + drafts, 24 // tp),), "tensor-parallel size 1, 0 draft tokens"),
        (lambda tp, drafts: right(tp, drafts if tp < 4 else 0), "tensor-parallel size 4, 1 draft tokens"),
        (lambda tp, drafts: right(tp, drafts)[::-1], "tensor-parallel size 1, 0 draft tokens"),
    ],
)
def test_a_shape_that_differs_under_any_size_is_named_with_layer_expected_found_and_fix(hook, sizes):
    (problem,) = problems_of(class_of(hook, layers_of(right)))
    assert "layer 'mixers.0' and 1 more (float32[" in problem and sizes in problem
    assert "found float32[" in problem and "return what the layers' state_shapes()" in problem


def test_dtypes_are_compared_too_and_default_to_the_models():
    half = (torch.bfloat16, torch.float32)
    assert problems_of(class_of(right, layers_of(right, half), dtypes=half)) == []
    (problem,) = problems_of(class_of(right, layers_of(right, half)))
    assert "expected the state of layer 'mixers.0' and 1 more (bfloat16[3, 24], float32[24])" in problem
    (problem,) = problems_of(class_of(right, layers_of(right), dtypes=(torch.float32,)))
    assert "gives 1 dtypes, and get_mamba_state_shape_from_config gives 2 shapes" in problem


def test_layers_with_different_states_are_an_error_that_names_the_odd_one():
    def layers(tp, drafts):
        return [Layer(right(tp, drafts), (torch.float32,) * 2), Layer(((4,),), (torch.float32,))]

    (problem,) = problems_of(class_of(right, layers))
    assert "layer 'mixers.1' (float32[4])" in problem and "all recurrent layers of a model share one state" in problem


def test_a_hook_that_fails_where_the_layers_do_not_is_named():
    def hook(tp, drafts):
        assert tp < 3
        return right(tp, drafts)

    (problem,) = problems_of(class_of(hook, layers_of(right)))
    assert "raised AssertionError for tensor-parallel size 3, 0 draft tokens" in problem


def test_sizes_that_the_class_refuses_are_left_out():
    def layers(tp, drafts):
        if tp == 3:
            raise ValueError("24 heads for 3 ranks")
        return layers_of(right)(tp, drafts)

    def hook(tp, drafts):
        return right(tp, drafts) if tp != 3 else ((1,), (1,))

    assert problems_of(class_of(hook, layers)) == []


def test_the_size_that_runs_is_looked_at_whatever_it_is():
    config = config_of()
    config.parallel_config, config.speculative_config = ParallelConfig(6), SpeculativeConfig(5)
    wrong = class_of(lambda tp, drafts: ((3, 24 // tp), (24 // tp,)), layers_of(right))
    assert "tensor-parallel size 6, 5 draft tokens" in problems_of(wrong, (), config)[0]


def test_loading_refuses_a_class_with_everything_that_differs():
    handle = class_of(lambda tp, drafts: ((9,),), layers_of(right))
    config = config_of()
    module = handle.cls(vllm_config=config)
    with pytest.raises(ContractError, match=r"plugin 'X': get_mamba_state_shape_from_config \(.*test_recurrent"):
        check_recurrent_layers(handle, handle.cls, module, config, "plugin 'X'")


def test_copy_functions_are_as_many_as_tensors_and_count_only_with_the_claim():
    def functions(cls):
        return (max,)

    body = {"get_mamba_state_copy_func": classmethod(functions)}
    spec = declared_state(class_of(right, layers_of(right)), config_of(), "x")
    assert copy_functions(class_of(right, layers_of(right), **body), spec, "x") is None
    with pytest.raises(ContractError, match="for 2 state tensors"):
        copy_functions(class_of(right, layers_of(right), supports_mamba_prefix_caching=True, **body), spec, "x")
