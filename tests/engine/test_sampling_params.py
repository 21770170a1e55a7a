"""SamplingParams: defaults and meaning as in vLLM; every mistake is told, all at once."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from torchplug.engine.sampling_params import RequestOutputKind, SamplingParams
from torchplug.engine.structured_outputs import StructuredOutputsParams
from torchplug.errors import RequestError


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)
    assert (params.detokenize, params.skip_special_tokens, params.include_stop_str_in_output) == (True, True, False)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


def test_values_become_their_plain_form():
    params = SamplingParams(stop="x", stop_token_ids=[np.int64(3)], seed=-1, top_k=-1, logprobs=True, temperature=0)
    assert params.stop == ("x",) and params.stop_token_ids == (3,) and type(params.stop_token_ids[0]) is int
    assert params.seed is None and params.top_k == 0 and params.logprobs == 1
    assert params.greedy and type(params.temperature) is float
    assert not SamplingParams(temperature=0.01).greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("seed", 1.5),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("detokenize", None),
        ("output_kind", "delta"),
        ("n", 0),
        ("n", True),
        ("prompt_logprobs", -2),
        ("logit_bias", {3: 100.5}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", [3]),
        ("structured_outputs", {"regex": "a"}),
        ("temperature", 10**400),
        ("temperature", True),
        ("seed", "x"),
        ("seed", True),
        ("top_k", True),
        ("stop", "\ud800"),
        ("stop", ["fine", "a\udfff"]),
        ("stop_token_ids", [True]),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("bad_words", "\ud800"),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "x"),
        ("allowed_token_ids", [1.0]),
        ("logit_bias", {3: 10**400}),
        ("max_tokens", 1.5),
        ("min_tokens", False),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert [problem.where for problem in caught.value.problems] == [name]
    assert repr(value)[:200] in str(caught.value) and len(str(caught.value)) < 1000


def test_a_number_that_python_does_not_write_out_is_refused_too():
    for name in ("temperature", "seed", "n", "presence_penalty"):
        with pytest.raises(RequestError, match=f"{name}: .*an integer of 33,220 bits"):
            SamplingParams(**{name: 10**10_000})


VLLMS = {
    "n": 2, "presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5, "temperature": 0.5,
    "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 3, "stop": "x", "stop_token_ids": [3], "ignore_eos": True,
    "max_tokens": 3, "min_tokens": 1, "logprobs": 1, "prompt_logprobs": 1, "detokenize": False,
    "skip_special_tokens": False, "include_stop_str_in_output": True, "output_kind": RequestOutputKind.DELTA,
    "structured_outputs": StructuredOutputsParams(choice=["a"]), "logit_bias": {3: 1.0}, "allowed_token_ids": [3],
    "bad_words": ["x"], "watermarking": True, "prompt_logprob_token_ids": [[1]], "prompt_logprob_start": 1,
    "logprob_token_ids": [3], "flat_logprobs": True, "spaces_between_special_tokens": False, "stream_interval": 2,
    "skip_clone": True, "output_text_buffer_length": 1, "extra_args": {"a": 1}, "thinking_token_budget": 3,
    "repetition_detection": {"max_pattern_size": 3}, "routed_experts_prompt_start": 1,
    "skip_reading_prefix_cache": True, "trace_decode_token_ids": [3],
}  # fmt: skip
"""The fields of vLLM 0.32's SamplingParams, each with a value that is not its default."""


@pytest.mark.parametrize("name", VLLMS)
def test_each_parameter_of_vllm_is_served_or_refused_by_name(name):
    value = VLLMS[name]
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    if name in fields:
        assert getattr(SamplingParams(**{name: value}), name) != getattr(SamplingParams(), name)
    else:
        with pytest.raises(RequestError, match=f"{name}: not served by this version"):
            SamplingParams(**{name: value})


def test_all_problems_come_at_once():
    with pytest.raises(RequestError) as caught:
        SamplingParams(
            temperature=-1,
            top_p=2,
            max_tokens=2,
            min_tokens=3,
            detokenize=False,
            stop="x",
            temprature=1,
            best_of=4,
            logprob_token_ids="x",
        )
    wheres = [problem.where for problem in caught.value.problems]
    assert wheres == ["temperature", "top_p", "min_tokens", "stop", "temprature", "best_of", "logprob_token_ids"]
    assert "did you mean 'temperature'?" in str(caught.value)
    assert "not served by this version" in str(caught.value)


def test_arguments_that_are_not_served_are_accepted_only_switched_off():
    assert SamplingParams(n=1, prompt_logprobs=None, logprob_token_ids=None) == SamplingParams()
    for other in ({"logprob_token_ids": [1]}, {"extra_args": {}}, {"logits_processors": [print]}):
        with pytest.raises(RequestError, match="not served by this version"):
            SamplingParams(**other)


def test_it_is_immutable_and_copied_with_replace():
    params = SamplingParams(max_tokens=3, stop=["a", "b"], seed=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 5
    copy = dataclasses.replace(params, max_tokens=5)
    assert (copy.max_tokens, copy.stop, copy.seed) == (5, ("a", "b"), 7)
    assert len({params, copy, SamplingParams(max_tokens=3, stop=["a", "b"], seed=7)}) == 2
    assert len({SamplingParams(logit_bias={1: 2.0}), SamplingParams(logit_bias={1: 2.0}), SamplingParams()}) == 2


def test_importing_it_imports_no_torch():
    heavy = "{'torch', 'numpy', 'jinja2', 'tokenizers'}"
    code = f"import sys, torchplug; torchplug.SamplingParams(); assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_only_the_values_together_break():
    with pytest.raises(RequestError, match="n: 2 greedy outputs would all be the same"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(RequestError, match="ignore_eos: a structured output ends"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), ignore_eos=True)


def test_a_bias_read_from_json_has_text_for_token_ids():
    assert SamplingParams(logit_bias={"3": -100, 5: np.float32(1)}).logit_bias == {3: -100.0, 5: 1.0}
    assert SamplingParams(logit_bias={}).logit_bias is None


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<call>", "schema": {}, "end": "</call>"}],
    "triggers": ["<ca"],
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "expected exactly one of json, regex, choice, grammar, json_object, structural_tag, got none of them"),
        ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
        ({"choice": []}, "choice: expected texts"),
        ({"choice": "abc"}, "choice: expected texts"),
        ({"choice": ["a", 3]}, "choice: expected texts"),
        ({"json": 7}, "json: expected str or dict, got int"),
        ({"json": {"a": {1, 2}}}, "json: is no JSON schema"),
        ({"regex": 7}, "regex: expected str, got int"),
        ({"regex": "a", "regexx": "x"}, "regexx: no such argument"),
        ({"regex": "a", "disable_fallback": True}, "disable_fallback: not served by this version"),
        ({"regex": "a", "structural_tag": "x"}, "expected exactly one of .*, got regex and structural_tag"),
        ({"structural_tag": "x"}, "structural_tag: is not JSON"),
        ({"structural_tag": 3}, "structural_tag: expected str or dict, got int"),
        ({"structural_tag": {"type": "structural_tag", "format": {}}}, "the form with a 'format' is not served"),
        ({"structural_tag": {**TAG, "structures": []}}, "structures: expected a list"),
        ({"structural_tag": {**TAG, "triggers": []}}, "triggers: expected texts"),
        ({"structural_tag": {**TAG, "triggers": ["[x"]}}, "begin '<call>' starts with none of the triggers"),
        ({"structural_tag": {**TAG, "structures": [{"begin": "<call>"}]}}, r"structures\[0\]: expected an object with"),
        ({"regex": "\ud800"}, "regex: holds half of a surrogate pair"),
        ({"json_object": True, "disable_any_whitespace": 1}, "disable_any_whitespace: expected True or False"),
    ],
)
def test_a_structure_that_is_none_is_refused(arguments, says):
    with pytest.raises(RequestError, match=says):
        StructuredOutputsParams(**arguments)


def test_a_structure_may_be_given_by_a_pydantic_model():
    class Like:
        @staticmethod
        def model_json_schema():
            return {"type": "object"}

    one = StructuredOutputsParams(json=Like)
    assert one.json == {"type": "object"} and one.form == "json"
    assert len({one, StructuredOutputsParams(json={"type": "object"}), StructuredOutputsParams(json_object=True)}) == 2
