"""The tokenizer: bos as the checkpoint says, decoding equal to the library's, bad text refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from torchplug.engine.tokenizer import Tokenizer
from torchplug.errors import RequestError


def with_bos(backend):
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))],
    )
    return backend


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("add_bos", [None, False, True])
def test_bos_is_added_once_where_the_checkpoint_says_so(backends, processor, add_bos):
    backend = backends["byte_level"]()
    backend = with_bos(backend) if processor else backend
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, add_bos_token=add_bos)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    ids = tokenizer.encode("hello")
    end = [tokenizer.eos_token_id] if processor else []
    wanted = processor if add_bos is None else add_bos
    assert ids == ([tokenizer.bos_token_id] if wanted else []) + plain + end
    assert tokenizer.bos_token_id not in plain


def test_truncation_and_padding_of_the_file_are_switched_off(backends):
    backend = backends["byte_level"]()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    assert Tokenizer(backend).encode("hello world") == backends["byte_level"]().encode("hello world").ids


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_decoding_what_was_encoded_equals_the_library(any_backend, text):
    ids = any_backend.encode(text).ids
    tokenizer = Tokenizer(any_backend)
    assert tokenizer.decode(ids) == any_backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == any_backend.decode(ids, skip_special_tokens=True)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_byte_level_ids_decode_as_the_library_decodes_them(backends, data):
    backend = backends["byte_level"]()
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=30))
    assert Tokenizer(backend).decode(ids) == backend.decode(ids, skip_special_tokens=False)
    assert Tokenizer(backend).decode(ids, skip_special_tokens=True) == backend.decode(ids, skip_special_tokens=True)


@given(st.data())
@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace", "wordpiece"])
def test_any_ids_decode_as_the_library_decodes_them(backends, kind, data):
    """Bytes that are not UTF-8 are kept apart: the library drops valid characters beside them, see the next test."""
    backend = backends[kind]()
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() + 3), max_size=12))
    expected = backend.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in expected:
        assert Tokenizer(backend).decode(ids) == expected


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("byte_level", ["a", "plain added", "Ġ", "</s>", "b"]),
        ("sentencepiece", ["<0x20>", "▁the", "<0x20>", "▁", "a"]),
        ("sentencepiece", ["▁", "▁", "<0xE5>", "<0x8F>", "<0xAB>", "<0x41>"]),
    ],
)
def test_tokens_out_of_the_ordinary_decode_as_the_library_decodes_them(backends, kind, tokens):
    backend = backends[kind]()
    ids = [backend.token_to_id(token) for token in tokens]
    assert None not in ids
    assert Tokenizer(backend).decode(ids) == backend.decode(ids, skip_special_tokens=False)


def test_a_valid_character_beside_bytes_that_are_none_survives(backends):
    backend = backends["sentencepiece"]()
    ids = [backend.token_to_id(token) for token in ("<0xE5>", "<0x8F>", "<0xAB>", "<0xFF>", "▁the")]
    assert Tokenizer(backend).decode(ids) == "叫\ufffd the"


def test_a_half_surrogate_is_refused_by_name(backends):
    with pytest.raises(RequestError, match=r"character 2.*half of a surrogate pair"):
        Tokenizer(backends["byte_level"]()).encode("ab\ud800c")


def test_the_demo_models_tokenizer_round_trips(demo_checkpoint):
    tokenizer = Tokenizer.from_checkpoint(demo_checkpoint)
    text = "The capital of France is Paris. 東京 👩‍👩‍👧 \n\tnaïve"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|im_end|>"
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""
    assert tokenizer.decode(10**9) == ""
