"""Views of a config: more defaults, values in place of the file's, a model inside the model."""

from __future__ import annotations

import pytest
import torch
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, VllmConfig
from torchplug.errors import MissingConfigKey


def view(values, defaults=None):
    return HfConfig(values, source="x/config.json", defaults=defaults)


def test_more_defaults_do_not_change_what_is_there():
    config = view({"a": 1}, {"b": 2}).with_defaults({"a": 7, "b": 7, "c": 3})
    assert (config.a, config.b, config.c) == (1, 2, 3)


def test_values_stand_in_place_of_the_files_and_the_rest_stays():
    config = view({"text": {"a": 1, "b": 2}}).text
    changed = config.updated(a=5, c=6)
    assert (changed.a, changed.b, changed.c) == (5, 2, 6) and config.a == 1
    with pytest.raises(MissingConfigKey, match=r"text\.missing"):
        _ = changed.missing


def test_a_model_inside_the_model_gets_its_own_config_and_the_rest_of_the_outer_one():
    outer = ModelConfig("x", view({"text_config": {"a": 1}}), torch.bfloat16, 77)
    config = VllmConfig(outer, DeviceConfig(torch.device("cpu")))
    inner = config.with_hf_config(outer.hf_text_config)
    assert inner.model_config.hf_config.a == 1
    assert (inner.model_config.dtype, inner.model_config.max_model_len) == (torch.bfloat16, 77)
    assert inner.cache_config is config.cache_config and config.model_config.hf_config is outer.hf_config
