"""`layer_window`: which layers of a config slide, against transformers' own reading, and what is refused by name."""

import pytest
from torchplug.config import HfConfig
from torchplug.errors import CheckpointError
from torchplug.layers import layer_window
from torchplug_models.mistral import MistralForCausalLM
from torchplug_models.qwen2 import Qwen2ForCausalLM, qwen_window
from transformers import MinistralConfig, Qwen2Config, Qwen3Config

LAYERS = 4
MIX = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def view(cls, **values):
    return HfConfig({"num_hidden_layers": LAYERS} | values, source="x/config.json", defaults=cls.config_defaults)


def theirs(config):
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


QWEN = [
    {},
    {"use_sliding_window": True},
    {"use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 9},
    {"use_sliding_window": True, "max_window_layers": 4, "sliding_window": 9},
    {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None},
    {"use_sliding_window": False, "max_window_layers": 1, "sliding_window": 9},
    {"use_sliding_window": True, "sliding_window": 9, "layer_types": MIX},
    {"use_sliding_window": True, "sliding_window": 9, "layer_types": None, "max_window_layers": 3},
    {"use_sliding_window": False, "sliding_window": 9, "layer_types": ["full_attention"] * LAYERS},
]


@pytest.mark.parametrize("values", QWEN, ids=str)
@pytest.mark.parametrize("oracle", [Qwen2Config, Qwen3Config])
def test_qwen_windows_are_transformers_own(values, oracle):
    config = view(Qwen2ForCausalLM, **values)
    ours = [qwen_window(config, index) for index in range(LAYERS)]
    assert ours == theirs(oracle(**{"num_hidden_layers": LAYERS} | values))


@pytest.mark.parametrize("values", [{}, {"sliding_window": 9}, {"sliding_window": None}, {"layer_types": MIX}], ids=str)
def test_mistral_windows_are_transformers_ministrals(values):
    config = view(MistralForCausalLM, **values)
    ours = [layer_window(config, index, config.sliding_window) for index in range(LAYERS)]
    assert ours == theirs(MinistralConfig(**{"num_hidden_layers": LAYERS} | values))


REFUSED = {
    "window of none": ({"sliding_window": 0}, "sliding_window", "found 0"),
    "negative window": ({"sliding_window": -1}, "sliding_window", "found -1"),
    "window in halves": ({"sliding_window": 2.5}, "sliding_window", "found 2.5"),
    "window a flag": ({"sliding_window": True}, "sliding_window", "found True"),
    "too few types": ({"layer_types": MIX[:3]}, "layer_types", "one type for each of 4 layers"),
    "types a text": ({"layer_types": "full"}, "layer_types", "found 'full'"),
    "unknown type": ({"layer_types": [*MIX[:3], "chunked_attention"]}, "layer_types[3]", "'chunked_attention'"),
    "type a list": ({"layer_types": [*MIX[:3], []]}, "layer_types[3]", "is not a known type"),
    "sliding without a window": ({"layer_types": MIX, "sliding_window": None}, "layer_types[1]", "switches"),
}


@pytest.mark.parametrize("values, where, says", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_key_and_file(values, where, says):
    config = view(MistralForCausalLM, **values)
    with pytest.raises(CheckpointError, match=r"x/config\.json") as caught:
        for index in range(LAYERS):
            layer_window(config, index, config.sliding_window)
    (problem,) = caught.value.problems
    assert problem.where == where and says in problem.says and problem.fix


def test_qwen_layers_that_slide_while_windows_are_off_are_refused():
    config = view(Qwen2ForCausalLM, layer_types=MIX, use_sliding_window=False, sliding_window=9)
    with pytest.raises(CheckpointError, match="switches sliding windows off"):
        [qwen_window(config, index) for index in range(LAYERS)]
