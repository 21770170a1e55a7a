"""Streams of text: their parts joined are the whole, none is ever taken back, and no part of a stop string gets out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchplug.engine.text_stream import StopMatcher, TextStream
from torchplug.engine.tokenizer import Tokenizer


def stream_parts(stream: TextStream, ids: list[int]) -> list[str]:
    parts = []
    for token_id in ids:
        stream.append(token_id)
        parts.append(stream.take_new())
        if stream.stopped_by is not None:
            break
    stream.finish()
    parts.append(stream.take_new())
    return parts


@given(st.text(max_size=40), st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_parts_of_a_stream_are_the_decoded_whole(any_backend, text, skip):
    tokenizer = Tokenizer(any_backend)
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    parts = stream_parts(stream, ids)
    assert "".join(parts) == stream.text == any_backend.decode(ids, skip_special_tokens=skip)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_ids_stream_as_they_decode(any_backend, data):
    tokenizer = Tokenizer(any_backend)
    ids = data.draw(st.lists(st.integers(0, any_backend.get_vocab_size() + 3), max_size=25))
    parts = stream_parts(TextStream(tokenizer, skip_special_tokens=False), ids)
    assert "".join(parts) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_of_several_tokens_is_shown_when_it_is_complete_and_not_before(backends, kind):
    backend = backends[kind]()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("a🧿b")
    stream = TextStream(tokenizer)
    parts = stream_parts(stream, ids)
    assert not any("\ufffd" in part for part in parts)
    assert parts.count("🧿") == 1 and "" in parts[: parts.index("🧿")]


def test_an_unfinished_character_at_the_end_is_one_replacement_character(backends):
    backend = backends["byte_level"]()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("x🧿")[:-1]
    parts = stream_parts(TextStream(tokenizer), ids)
    assert parts[-1] == "\ufffd" and "".join(parts) == backend.decode(ids)


@given(st.text(alphabet="abc theis東é\n", min_size=1, max_size=30), st.data())
@settings(max_examples=200, deadline=None)
def test_an_output_continues_its_prompt_with_its_leading_space(backends, text, data):
    tokenizer = Tokenizer(backends["sentencepiece"]())
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(1, len(ids)))
    head, tail = [1, *ids[:cut]], ids[cut:]
    parts = stream_parts(TextStream(tokenizer, prompt_token_ids=head), tail)
    assert tokenizer.decode(head, skip_special_tokens=True) + "".join(parts) == tokenizer.decode(ids)


def test_a_space_at_the_start_of_a_text_is_dropped_only_there(backends):
    tokenizer = Tokenizer(backends["sentencepiece"]())
    the = tokenizer.backend.token_to_id("▁the")
    assert stream_parts(TextStream(tokenizer), [the, the])[:2] == ["the", " the"]
    assert stream_parts(TextStream(tokenizer, prompt_token_ids=[1, the, 2]), [the])[0] == " the"


ALPHABET = st.text(alphabet="ab", min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By definition: read character by character until a stop string is at the end; the longest such one."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(st.text(alphabet="ab", max_size=5), max_size=8), st.lists(ALPHABET, min_size=1, max_size=3))
@settings(max_examples=1000, deadline=None)
def test_stop_strings_are_found_however_the_text_is_cut(chunks, stops):
    matcher = StopMatcher(stops)
    shown = ""
    expected, found = first_stop("".join(chunks), stops)
    for chunk in chunks:
        shown += matcher.feed(chunk)
        assert expected.startswith(shown)  # nothing was shown that the end takes back
        if matcher.found:
            break
    shown += matcher.finish()
    assert (shown, matcher.found) == (expected, found)


def test_only_what_could_be_a_stop_string_is_held_back():
    matcher = StopMatcher(["</end>"])
    assert matcher.feed("a < b </e") == "a < b "
    assert matcher.feed("m>") == "</em>"
    assert matcher.feed("x</end>y") == "x" and matcher.found == "</end>"


def test_a_stop_string_may_be_kept():
    matcher = StopMatcher(["END"], include=True)
    assert [matcher.feed("abcE"), matcher.feed("NDx")] == ["abc", "END"]


def test_the_first_min_tokens_are_not_searched_for_stop_strings(backends):
    tokenizer = Tokenizer(backends["byte_level"]())
    ids = [tokenizer.backend.token_to_id(c) for c in "xyxyx"]
    stream = TextStream(tokenizer, stop=["x"], min_tokens=2)
    assert "".join(stream_parts(stream, ids)) == "xy" and stream.stopped_by == "x"
    assert "".join(stream_parts(TextStream(tokenizer, stop=["yx"], min_tokens=2), ids)) == "xyx"
