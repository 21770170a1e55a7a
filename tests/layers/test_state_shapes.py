"""Shapes and dtypes of recurrent states, for every number of ranks and drafts, and that layers and hooks agree."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torchplug.config import CacheConfig, DeviceConfig, HfConfig, ModelConfig, ParallelConfig, VllmConfig
from torchplug.errors import CheckpointError
from torchplug.layers import (
    RecurrentLayer,
    StateSettings,
    mamba1_state_shapes,
    mamba2_state_shapes,
    short_conv_state_shapes,
)
from torchplug_models.falcon_mamba import FalconMambaForCausalLM
from torchplug_models.mamba import MambaForCausalLM
from torchplug_models.mamba2 import Mamba2ForCausalLM

ONE_GROUP = {
    "intermediate_size": 4096,
    "num_heads": 64,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 1,
    "conv_kernel": 4,
}


def config_of(cls, *, tp_size=1, num_spec=0, dtype=torch.bfloat16, cache=None, **changes):
    values = cls.tiny_config() | changes
    return VllmConfig(
        ModelConfig("m", HfConfig(values, source="m", defaults=cls.config_defaults), dtype, 64),
        DeviceConfig(torch.device("cpu")),
        cache_config=cache or CacheConfig(),
        parallel_config=ParallelConfig(tensor_parallel_size=tp_size),
        speculative_config=SimpleNamespace(num_speculative_tokens=num_spec) if num_spec else None,
    )


def test_mamba_1():
    shapes = mamba1_state_shapes(
        StateSettings(tp_size=2, num_spec=3), intermediate_size=1536, state_size=16, conv_kernel=4
    )
    assert shapes == ((3, 768), (768, 16))  # no rows for drafts


def test_mamba_2():
    assert mamba2_state_shapes(StateSettings(), **ONE_GROUP) == ((3, 4352), (64, 64, 128))
    assert mamba2_state_shapes(StateSettings(tp_size=2, num_spec=3), **ONE_GROUP) == ((6, 2304), (32, 64, 128))


@pytest.mark.parametrize(
    ("groups", "tp_size", "held"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (2, 4, 1), (1, 4, 1), (4, 4, 1)]
)
def test_a_rank_holds_the_groups_that_its_heads_read(groups, tp_size, held):
    (conv, _) = mamba2_state_shapes(StateSettings(tp_size=tp_size), **ONE_GROUP | {"n_groups": groups})
    assert conv == (3, 4096 // tp_size + 2 * held * 128)
    heads = range(64)
    for rank in range(tp_size):
        mine = heads[rank * 64 // tp_size : (rank + 1) * 64 // tp_size]
        assert len({head // (64 // groups) for head in mine}) == held


REFUSED = {
    "intermediate_size: 1536 cannot": (5, {"state_size": 16}),
    "num_heads: 64 cannot": (3, {}),
    "n_groups: 3 groups cannot be spread over 2": (2, {"n_groups": 3, "num_heads": 66}),
    "n_groups: 6 groups cannot be spread over 4": (4, {"n_groups": 6, "num_heads": 24}),
    "n_groups: 64 heads cannot share 5": (1, {"n_groups": 5}),
    "hidden_size: 64 cannot": (3, {"hidden_size": 64}),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_ranks_cannot_share_is_an_error_that_says_so(says):
    tp_size, sizes = REFUSED[says]
    settings = StateSettings(tp_size=tp_size)
    with pytest.raises(CheckpointError, match=f"recurrent state: {says}") as error:
        if "intermediate_size" in says:
            mamba1_state_shapes(settings, intermediate_size=1536, conv_kernel=4, **sizes)
        elif "hidden_size" in says:
            short_conv_state_shapes(settings, conv_kernel=3, **sizes)
        else:
            mamba2_state_shapes(settings, **ONE_GROUP | sizes)
    assert "fix:" in str(error.value)


def test_short_convolution():
    settings = StateSettings(tp_size=2, num_spec=2)
    assert short_conv_state_shapes(settings, hidden_size=64, conv_kernel=3) == ((4, 32),)


def test_dtypes():
    def dtypes(**cache):
        return StateSettings.of(config_of(MambaForCausalLM, cache=CacheConfig(**cache))).dtypes

    assert dtypes() == (torch.bfloat16, torch.float32)
    assert dtypes(mamba_cache_dtype="float16") == (torch.float16, torch.float16)
    assert dtypes(mamba_ssm_cache_dtype="bfloat16") == (torch.bfloat16, torch.bfloat16)
    assert dtypes(mamba_cache_dtype="float32", mamba_ssm_cache_dtype="bfloat16") == (torch.float32, torch.bfloat16)
    with pytest.raises(CheckpointError, match="mamba_ssm_cache_dtype: 'fp8' is not one of auto, bfloat16"):
        dtypes(mamba_ssm_cache_dtype="fp8")


@pytest.mark.parametrize("num_spec", range(4))
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("cls", [MambaForCausalLM, FalconMambaForCausalLM, Mamba2ForCausalLM])
def test_a_class_says_what_its_layers_use(cls, tp_size, num_spec):
    config = config_of(cls, tp_size=tp_size, num_spec=num_spec)
    with torch.device("meta"):
        layers = [part for part in cls(vllm_config=config).modules() if isinstance(part, RecurrentLayer)]
    assert len(layers) == 2
    for layer in layers:
        assert layer.state_shapes() == cls.get_mamba_state_shape_from_config(config)
        assert layer.state_dtypes() == cls.get_mamba_state_dtype_from_config(config)
    assert len(cls.get_mamba_state_copy_func()) == len(layers[0].state_shapes())


def test_settings_are_decided_once():
    with pytest.raises(dataclasses.FrozenInstanceError):
        StateSettings().tp_size = 2
