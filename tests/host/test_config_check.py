"""What config.json must hold whatever the model: each wrong value is named with the file, and all are in one error."""

from __future__ import annotations

import pytest
from torchplug.errors import CheckpointError
from torchplug.host.config_check import check_config

CONFIG = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DEFAULTS = {"attention_bias": False, "rms_norm_eps": 1e-6, "first_expert": 3, "hidden_act": "silu", "head_dim": None}


def check(config):
    check_config(CONFIG | config, DEFAULTS, name="x", source="x/config.json")


@pytest.mark.parametrize("value", ["12", -1, 0, 1.5, 64.0, 10**30, [], [1, "2"], {}, True, ""])
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_key_value_heads", "max_position_embeddings"])
def test_a_size_that_is_no_positive_whole_number_is_refused(key, value):
    with pytest.raises(CheckpointError, match=f"checkpoint 'x': x/config.json, {key}: expected a whole number from 1"):
        check({key: value})


def test_the_number_of_layers_is_bounded_before_any_is_built():
    with pytest.raises(
        CheckpointError, match="num_hidden_layers: expected a whole number from 1 to 10,000, found 1000000"
    ):
        check({"num_hidden_layers": 10**12})


@pytest.mark.parametrize(
    "config", [{"head_dim": None}, {"intermediate_size": [64, 96]}, {"hidden_act": 5}, {"new": "x"}]
)
def test_what_may_be_null_or_a_list_or_unknown_is_left_to_the_class(config):
    check(config)


def test_null_is_no_vocabulary():
    with pytest.raises(CheckpointError, match=r"vocab_size: expected a whole number from 1 to [0-9,]+, found null"):
        check({"vocab_size": None})


@pytest.mark.parametrize("value", ["false", 0, 1, [True]])
@pytest.mark.parametrize("key", ["tie_word_embeddings", "attention_bias"])
def test_a_text_is_no_flag(key, value):
    with pytest.raises(CheckpointError, match=f"{key}: expected true or false"):
        check({key: value})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("rms_norm_eps", "1e-6", "a number"),
        ("rms_norm_eps", float("inf"), "a number"),
        ("rms_norm_eps", True, "a number"),
        ("first_expert", 1.5, "a whole number"),
    ],
)
def test_a_declared_default_says_what_the_file_must_hold(key, value, expected):
    with pytest.raises(CheckpointError, match=f"{key}: expected {expected}"):
        check({key: value})


def test_all_wrong_values_are_one_error_nested_ones_included():
    with pytest.raises(CheckpointError) as raised:
        check({"hidden_size": "64", "text_config": {"hidden_size": "64"}})
    assert [p.where for p in raised.value.problems] == [
        "x/config.json, hidden_size",
        "x/config.json, text_config.hidden_size",
    ]
