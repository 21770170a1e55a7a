"""The encoder cache: shared by content, bounded, nothing that is held ever leaves, nothing is encoded twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchplug.engine.encoder_cache import EncoderCache

SIZES = {"a": 1, "b": 2, "c": 3, "d": 5}


def encoded(cache, holder, name):
    assert cache.hold(holder, name, SIZES[name])
    if not cache.is_encoded(name):
        cache.put(name, torch.full((SIZES[name], 2), ord(name)))
    return cache.get(name)


def test_an_item_is_encoded_once_for_all_who_hold_it():
    cache = EncoderCache(10)
    first = encoded(cache, 1, "c")
    assert encoded(cache, 2, "c") is first and encoded(cache, 2, "c") is first
    assert (cache.num_encoded, cache.num_hits, cache.num_rows, cache.num_held) == (1, 1, 3, 1)
    cache.release(1, "c")
    assert cache.num_held == 1
    cache.release(2, "c")
    assert cache.num_held == 0 and cache.num_rows == 3
    assert encoded(cache, 3, "c") is first and cache.num_encoded == 1


def test_the_one_let_go_longest_ago_leaves_first():
    cache = EncoderCache(6)
    for name in ("a", "b", "c"):
        encoded(cache, 1, name)
    for name in ("b", "a", "c"):
        cache.release(1, name)
    encoded(cache, 2, "a")  # held again, and let go last
    cache.release(2, "a")
    cache.hold(2, "d", 5)
    assert cache.num_rows == 6
    assert cache.hold(3, "a", 1) and cache.is_encoded("a")


def test_without_room_nothing_changes():
    cache = EncoderCache(6)
    kept = encoded(cache, 1, "a")
    cache.release(1, "a")
    encoded(cache, 2, "b")
    assert not cache.hold(3, "d", 5)
    assert cache.num_rows == 3 and cache.hold(3, "a", 1) and cache.get("a") is kept
    cache.release(2, "b")
    cache.release(3, "a")
    assert cache.hold(3, "d", 5) and not cache.is_encoded("d")
    assert not EncoderCache(4).hold(1, "d", 5)


def test_what_was_reserved_and_never_encoded_leaves_at_once():
    cache = EncoderCache(5)
    cache.hold(1, "d", 5)
    cache.hold(2, "d", 5)
    cache.release(1, "d")
    assert cache.num_rows == 5
    cache.release(2, "d")
    assert cache.num_rows == 0 and cache.num_held == 0
    cache.release(2, "d")
    cache.release(2, "unknown")


def test_another_number_of_rows_than_reserved_is_refused():
    cache = EncoderCache(5)
    cache.hold(1, "c", 3)
    with pytest.raises(ValueError, match="1 rows for an item with room for 3"):
        cache.put("c", torch.zeros(1, 2))
    assert not cache.is_encoded("c") and cache.num_encoded == 0


def test_clear_forgets_even_what_is_held():
    cache = EncoderCache(5)
    encoded(cache, 1, "c")
    cache.clear()
    assert (cache.num_rows, cache.num_held) == (0, 0)
    cache.release(1, "c")
    encoded(cache, 1, "c")
    assert cache.num_encoded == 2


@given(
    st.lists(st.tuples(st.sampled_from(["hold", "release"]), st.integers(0, 3), st.sampled_from("abcd")), max_size=60)
)
def test_whatever_happens_it_stays_in_its_bounds_and_keeps_what_is_held(steps):
    cache, held = EncoderCache(7), set()
    for action, holder, name in steps:
        if action == "release":
            cache.release(holder, name)
            held.discard((holder, name))
        elif cache.hold(holder, name, SIZES[name]):
            held.add((holder, name))
            if not cache.is_encoded(name):
                cache.put(name, torch.full((SIZES[name], 1), ord(name)))
        else:
            others = {other for _, other in held}
            assert name not in others and sum(SIZES[other] for other in others) + SIZES[name] > 7
        names = {name for _, name in held}
        assert cache.num_held == len(names)
        assert sum(SIZES[name] for name in names) <= cache.num_rows <= 7
        for name in names:
            assert cache.get(name).tolist() == [[ord(name)]] * SIZES[name]
