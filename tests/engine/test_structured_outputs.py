"""Structured outputs: the text always parses or matches, ends only where it may, and a bad structure is told."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchplug.engine.grammar import Grammars, _tokens_inside_a_text
from torchplug.engine.llm import LLM
from torchplug.engine.sampler import Sampler, SamplingState
from torchplug.engine.sampling_params import SamplingParams
from torchplug.engine.structured_outputs import StructuredOutputsParams
from torchplug.engine.tokenizer import Tokenizer
from torchplug.errors import RequestError

pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<call>", "schema": PERSON, "end": "</call>"}],
    "triggers": ["<ca"],
}


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    torch.set_num_threads(1)
    with LLM(tiny_checkpoint, max_model_len=512, max_num_seqs=8) as llm:
        yield llm


def params(seed: int = 0, **structure) -> SamplingParams:
    return SamplingParams(
        temperature=1.5, max_tokens=120, seed=seed, structured_outputs=StructuredOutputsParams(**structure)
    )


def answers(llm, count: int, **structure) -> list:
    outputs = llm.generate(["the capital"] * count, [params(seed, **structure) for seed in range(count)])
    return [output.outputs[0] for output in outputs]


def test_a_schema_gives_json_that_keeps_to_it(llm):
    found = answers(llm, 12, json=PERSON, disable_any_whitespace=True)
    ended = [json.loads(one.text) for one in found if one.finish_reason == "stop"]
    assert len(ended) >= 8 and len({json.dumps(each) for each in ended}) > 4
    for each in ended:
        assert set(each) == {"name", "age"} and len(each["name"]) <= 5 and 0 <= each["age"] <= 99
    assert all(" " not in one.text.split('"name"')[0] for one in found)


@pytest.mark.parametrize(
    "regex", [r"[a-c]{3,7}", r"(Paris|Rome), \d\d", r"é+|東京", r"a?b?c?", r"\d+(\.\d{2})?", r"[^\n]{0,6}!"]
)
def test_a_regex_is_matched_by_the_whole_text(llm, regex):
    found = answers(llm, 8, regex=regex)
    ended = [one for one in found if one.finish_reason == "stop"]
    assert ended and all(re.fullmatch(regex, one.text) for one in ended), [one.text for one in found]


def test_a_choice_is_one_of_the_texts(llm):
    texts = ("Paris", "Paris, France", 'a "quoted" \\ text', "東京", "é\n", "Rome")
    found = answers(llm, 24, choice=texts)
    assert {one.finish_reason for one in found} == {"stop"}
    assert {one.text for one in found} <= set(texts) and len({one.text for one in found}) > 2


def test_a_grammar_and_any_json_object(llm):
    found = answers(llm, 6, grammar='root ::= "(" root ")" | "x"')
    assert all(re.fullmatch(r"\(*x\)*", one.text) for one in found if one.finish_reason == "stop")
    assert any(one.finish_reason == "stop" for one in found)
    (forced,) = answers(llm, 1, grammar='start: "yes" | "yes"')
    assert forced.text == "yes"
    found = answers(llm, 12, json_object=True, disable_any_whitespace=True)
    assert all(isinstance(json.loads(one.text), dict) for one in found if one.finish_reason == "stop")


def test_greedy_outputs_keep_to_their_structures_beside_free_ones(llm):
    greedy = SamplingParams(temperature=0, max_tokens=20)
    structured = dataclasses.replace(greedy, structured_outputs=StructuredOutputsParams(regex="[ab]{4}"))
    free, kept, also_free = llm.generate(["the", "the", "of"], [greedy, structured, greedy])
    assert re.fullmatch("[ab]{4}", kept.outputs[0].text) and kept.outputs[0].finish_reason == "stop"
    assert free.outputs == llm.generate("the", greedy)[0].outputs
    assert also_free.outputs == llm.generate("of", greedy)[0].outputs


def test_the_end_is_allowed_exactly_where_the_output_is_complete(llm):
    grammars = Grammars(llm.get_tokenizer(), {2})
    matcher = grammars.matcher(StructuredOutputsParams(regex="ab?"))
    a, b = (llm.get_tokenizer().encode(text)[0] for text in "ab")
    assert torch.nonzero(matcher.allowed(300)).flatten().tolist() == [a] and not matcher.complete
    matcher.advance(a)
    assert set(torch.nonzero(matcher.allowed(300)).flatten().tolist()) == {b, 2} and matcher.complete
    matcher.advance(b)
    assert torch.nonzero(matcher.allowed(300)).flatten().tolist() == [2]
    assert matcher.allowed(600)[300:].sum() == 0 and matcher.allowed(600).shape == (600,)


def test_min_tokens_waits_only_where_the_structure_can_go_on(llm):
    for seed in range(4):
        more = dataclasses.replace(params(seed, regex="a*"), min_tokens=9, max_tokens=12)
        (output,) = llm.generate("the", more)
        assert len(output.outputs[0].token_ids) >= 9 and set(output.outputs[0].text) == {"a"}
    (output,) = llm.generate("the", dataclasses.replace(params(regex="ab"), min_tokens=9))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ab", "stop")


def test_a_cut_output_is_the_beginning_of_one(llm):
    cut = dataclasses.replace(params(regex="x{40}"), max_tokens=5)
    (output,) = llm.generate("the", cut)
    assert output.outputs[0].text == "xxxxx" and output.outputs[0].finish_reason == "length"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_whatever_is_drawn_follows_the_structure(backends, data):
    """Any tokenizer, any schema of a family, any logits: the text that our tokenizer spells parses when it ends."""
    name = data.draw(st.sampled_from(["byte_level", "sentencepiece"]))
    tokenizer = Tokenizer(backends[name](), special_tokens={"eos_token": "</s>"})
    leaf = st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"enum": ["a b", "é", 3]}, {"type": "null"}])
    schema = data.draw(
        st.recursive(
            leaf,
            lambda inner: st.one_of(
                st.builds(lambda item: {"type": "array", "items": item, "maxItems": 3}, inner),
                st.builds(
                    lambda one, two: {"type": "object", "properties": {"a": one, "b c": two}, "required": ["a"]},
                    inner,
                    inner,
                ),
            ),
            max_leaves=4,
        )
    )
    structure = StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)
    eos = tokenizer.eos_token_id
    own = SamplingParams(seed=data.draw(st.integers(0, 999)), max_tokens=400, structured_outputs=structure)
    state = SamplingState(own, [], [eos], Grammars(tokenizer, {eos}).matcher(structure))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    ids: list[int] = [tokenizer.encode("the")[-1]]
    for _ in range(400):
        logits = torch.randn(1, tokenizer.vocab_size + 9, generator=generator)
        (token,) = Sampler(0).sample(logits, [state]).token_ids
        if token == eos:
            break
        ids.append(token)
    text = tokenizer.decode(ids)[len(tokenizer.decode(ids[:1])) :]
    if token == eos:
        _conforms(json.loads(text), schema)


def _conforms(value, schema) -> None:
    if "enum" in schema:
        assert value in schema["enum"]
    elif schema["type"] == "array":
        assert isinstance(value, list) and len(value) <= 3
        for each in value:
            _conforms(each, schema["items"])
    elif schema["type"] == "object":
        assert {"a"} <= set(value) <= {"a", "b c"}
        for key, each in value.items():
            _conforms(each, schema["properties"][key])
    else:
        assert type(value) is {"integer": int, "boolean": bool, "null": type(None)}[schema["type"]]


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ({"json": {"type": "nope"}}, "json: Invalid type: nope"),
        ({"json": "{"}, "json: Expecting property name"),
        ({"json": {"type": "string", "format": "no-such-format"}}, "json: Unknown format"),
        ({"regex": "(["}, "regex: .*unclosed character class"),
        ({"regex": "(?=a)b"}, "regex: .*look-around"),
        ({"grammar": "root ::= ("}, "grammar: "),
    ],
)
def test_a_bad_structure_is_told_before_anything_runs(llm, structure, says):
    with pytest.raises(RequestError, match=rf"(?s)prompt 0: structured_outputs.*{says}"):
        llm.generate("the", params(**structure))
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_structural_tag_holds_once_its_trigger_was_said(llm):
    """A model of random weights never says the trigger by itself, so it is pushed there."""
    text = llm.get_tokenizer()
    push = dict.fromkeys(text.encode("<ca", add_special_tokens=False), 60.0)
    found = []
    for seed in range(12):
        structure = StructuredOutputsParams(
            structural_tag=json.dumps(TAG), disable_any_whitespace=True, disable_additional_properties=True
        )
        free = SamplingParams(
            temperature=1.5, max_tokens=80, seed=seed, structured_outputs=structure, logit_bias=push, top_k=5
        )
        found.append(llm.generate("the", free)[0].outputs[0].text)
    whole = [part for one in found for part in re.findall(r"<call>(.*?)</call>", one, re.DOTALL)]
    assert len(whole) >= 4, found
    for part in whole:
        assert set(json.loads(part)) == {"name", "age"}
    for one in found:  # a trigger is the beginning of a call, unless the output was cut there
        assert "<ca" not in re.sub(r"<call>.*?(</call>|$)", "|", one, flags=re.DOTALL)[:-6], one
    (plain,) = answers(llm, 1, structural_tag=TAG)  # and free text stays free
    assert plain.finish_reason in ("stop", "length") and "<call>" not in plain.text


def test_closing_objects_leaves_data_and_property_names_alone(llm):
    schema = {
        "properties": {"properties": {"type": "integer"}, "enum": {"enum": [{"type": "object"}]}},
        "type": "object",
    }
    found = answers(llm, 8, json=schema, disable_additional_properties=True, disable_any_whitespace=True)
    for one in found:
        if one.finish_reason == "stop":
            assert set(json.loads(one.text)) <= {"properties", "enum"}
            assert json.loads(one.text).get("enum", {"type": "object"}) == {"type": "object"}


def test_what_is_missing_is_told(llm, monkeypatch):
    structure = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="needs a tokenizer"):
        Grammars(None, {2}).matcher(structure)
    with pytest.raises(RequestError, match="needs an end-of-sequence token"):
        Grammars(llm.get_tokenizer(), set()).matcher(structure)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r'not installed\n  fix: pip install "torchplug\[structured\]"'):
        llm.generate("the", params(regex="a"))


def test_an_output_that_outgrows_its_matcher_ends_alone(llm, monkeypatch):
    from torchplug.engine.grammar import Matcher

    def fail(self, vocab_size):
        raise RequestError("request", RequestError("x", []).problems or [_problem()])

    def _problem():
        from torchplug.errors import Problem

        return Problem("structured_outputs", "too complex", "use a simpler one")

    monkeypatch.setattr(Matcher, "allowed", fail)
    bad, good = llm.generate(["the", "of"], [params(regex="a+"), SamplingParams(temperature=0, max_tokens=5)])
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", "too complex")
    assert len(good.outputs[0].token_ids) == 5


def test_a_text_that_is_forced_is_tokenized_as_the_tokenizer_does_it(backends):
    """Not the longest token first: the model has seen the tokenizer's own choice."""
    for name in ("byte_level", "sentencepiece"):
        tokenizer = Tokenizer(backends[name]())
        spelling = [
            tokenizer.piece(i, 10) if tokenizer.is_textual(i, True) else b"" for i in range(tokenizer.vocab_size)
        ]
        for text in ("The capital", "of France", "the cab is", "naïve café", "東京", "a\nb", '"the": '):
            found = _tokens_inside_a_text(tokenizer, text, spelling)
            assert b"".join(spelling[i] for i in found) == text.encode()
            whole = tokenizer.encode("x" + text, add_special_tokens=False)
            if name == "byte_level":
                assert found == tokenizer.encode(text, add_special_tokens=False)
            elif whole[-len(found) :] != found:
                assert found == tokenizer.encode("\n" + text, add_special_tokens=False)[-len(found) :]
    greedy_first = Tokenizer(backends["byte_level"]())
    spelling = [greedy_first.piece(i, 10) for i in range(greedy_first.vocab_size)]
    texts = [greedy_first.decode([a, b]) for a in range(260, 340, 3) for b in range(260, 340, 3)]
    texts = [text for text in texts if "\ufffd" not in text]
    found = [_tokens_inside_a_text(greedy_first, text, spelling) for text in texts]
    assert found == [greedy_first.encode(text, add_special_tokens=False) for text in texts]
