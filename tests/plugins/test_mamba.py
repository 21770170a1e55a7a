"""Mamba, Falcon Mamba and Mamba-2 built by hand: claims, sizes that follow from the config, older spellings."""

import json
import math

import pytest
import torch
from torchplug import Host
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, VllmConfig
from torchplug.errors import CheckpointError
from torchplug.layers import RecurrentLayer
from torchplug_models.falcon_mamba import FalconMambaForCausalLM
from torchplug_models.mamba import MambaForCausalLM
from torchplug_models.mamba2 import Mamba2ForCausalLM

CLASSES = [MambaForCausalLM, FalconMambaForCausalLM, Mamba2ForCausalLM]


def config_of(cls, **changes):
    values = {key: value for key, value in (cls.tiny_config() | changes).items() if value is not ...}
    view = HfConfig(values, source="x/config.json", defaults=cls.config_defaults)
    return VllmConfig(ModelConfig("x", view, torch.float32, 256), DeviceConfig(torch.device("cpu")))


def build(cls, **changes):
    return cls(vllm_config=config_of(cls, **changes)).eval()


@pytest.mark.parametrize("cls", CLASSES)
def test_what_the_classes_claim(cls):
    found = Host().model_class(cls.__name__)
    assert found.interfaces == {"HasInnerState", "IsAttentionFree", "SupportsMambaPrefixCaching"}
    config = config_of(cls)
    shapes = found.hooks.get_mamba_state_shape_from_config(config)
    assert len(shapes) == len(found.hooks.get_mamba_state_dtype_from_config(config)) == 2
    assert len(found.hooks.get_mamba_state_copy_func()) == 2
    layers = [part for part in build(cls).modules() if isinstance(part, RecurrentLayer)]
    assert [layer.state_shapes() for layer in layers] == [shapes] * 2


@pytest.mark.parametrize(
    ("changes", "channels", "rank"),
    [
        ({}, 96, 5),
        ({"expand": 3}, 144, 5),
        ({"expand": 16, "intermediate_size": 80}, 80, 5),
        ({"time_step_rank": "auto"}, 96, 3),
        ({"time_step_rank": ..., "hidden_size": 50}, 100, 4),
    ],
)
def test_sizes_that_follow_from_others(changes, channels, rank):
    mixer = build(FalconMambaForCausalLM, **changes).backbone.layers[0].mixer
    assert mixer.conv1d.channels == channels
    assert mixer.dt_proj.weight.shape == (channels, rank)


@pytest.mark.parametrize(
    ("written", "limit"),
    [
        ("[0.0, Infinity]", (0.0, math.inf)),  # mamba_ssm, transformers 4
        ('[0.0, {"__float__": "Infinity"}]', (0.0, math.inf)),  # transformers 5
        ("[0.001, 0.1]", (0.001, 0.1)),
    ],
)
def test_every_spelling_of_the_step_limit(written, limit):
    model = build(Mamba2ForCausalLM, time_step_limit=json.loads(written))
    assert model.backbone.layers[0].mixer._limit == limit


def test_heads_and_groups_that_do_not_fit():
    with pytest.raises(CheckpointError, match="n_groups: 4 heads cannot share 3 groups evenly"):
        build(Mamba2ForCausalLM, n_groups=3)
    with pytest.raises(ValueError, match="4 heads of size 8 do not make up 64 channels"):
        build(Mamba2ForCausalLM, head_dim=8)


def test_a_residual_stream_in_the_models_dtype():
    """`residual_in_fp32` false: in bfloat16 the stream is rounded after each layer."""
    torch.manual_seed(0)
    wide, narrow = (build(MambaForCausalLM, residual_in_fp32=flag).bfloat16() for flag in (True, False))
    tensors = {name: torch.randn(parameter.shape) for name, parameter in wide.named_parameters()}
    for model in (wide, narrow):
        model.load_weights(tensors.items())
    ids, positions = torch.arange(20), torch.arange(20)
    with torch.inference_mode():
        a, b = wide(ids, positions), narrow(ids, positions)
    assert a.dtype is b.dtype is torch.bfloat16
    assert not torch.equal(a, b)
    assert (a.float() - b.float()).abs().max() <= 0.2 * a.float().abs().max()
