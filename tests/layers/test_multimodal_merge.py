"""The merge of multimodal rows into text embeddings: exact, checked before it writes, and silent about nothing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchplug.errors import ContractError
from torchplug.layers.multimodal import _merge_multimodal_embeddings, _require_is_multimodal, embed_text_rows

HIDDEN = 4


def rows(count, hidden=HIDDEN, dtype=torch.float32):
    return torch.randn(count, hidden).to(dtype)


def mask_of(text):
    """ "..xx." -> bool mask, True at x."""
    return torch.tensor([letter == "x" for letter in text])


def refused(embeds, items, mask, *texts):
    before, kept = embeds.clone(), mask.clone()
    with pytest.raises(ContractError) as caught:
        _merge_multimodal_embeddings(embeds, items, mask)
    for text in (*texts, "fix: "):
        assert text in str(caught.value), str(caught.value)
    assert torch.equal(embeds, before), "nothing may be written before everything is checked"
    assert torch.equal(mask, kept)


@given(
    mask=st.lists(st.booleans(), max_size=24),
    cuts=st.lists(st.integers(0, 24), max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from([list, tuple]),
)
def test_merge_equals_writing_row_by_row(mask, cuts, dtype, kind):
    is_multimodal = torch.tensor(mask, dtype=torch.bool)
    total = sum(mask)
    bounds = [0, *sorted(min(cut, total) for cut in cuts), total]
    every = rows(total, dtype=torch.float32)
    items = kind(every[a:b] for a, b in pairwise(bounds))
    embeds = rows(len(mask), dtype=dtype)
    expected = embeds.clone()
    taken = iter(every)
    for place, marked in enumerate(mask):
        if marked:
            expected[place] = next(taken).to(dtype)
    kept = is_multimodal.clone()
    merged = _merge_multimodal_embeddings(embeds, items, is_multimodal)
    assert merged.dtype is dtype and torch.equal(merged, expected)
    assert torch.equal(is_multimodal, kept)


def test_items_of_equal_length_may_come_as_one_tensor():
    items = torch.randn(2, 3, HIDDEN)
    embeds = rows(8)
    merged = _merge_multimodal_embeddings(embeds.clone(), items, mask_of("xxx.xxx."))
    assert torch.equal(merged[[0, 1, 2, 4, 5, 6]], items.reshape(6, HIDDEN))
    assert torch.equal(merged[[3, 7]], embeds[[3, 7]])


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4), placeholders=st.integers(0, 20))
def test_any_other_number_of_rows_is_refused(counts, placeholders):
    items = [rows(count) for count in counts]
    mask = torch.arange(24) < placeholders
    if sum(counts) == placeholders:
        _merge_multimodal_embeddings(rows(24), items, mask)
    else:
        says = f"{' + '.join(map(str, counts))} = {sum(counts)} embedding rows for {placeholders} placeholder tokens"
        refused(rows(24), items, mask, says)


def test_one_row_is_not_spread_over_all_placeholders():
    refused(rows(5), [rows(1)], mask_of(".xxx."), "1 = 1 embedding rows for 3 placeholder tokens")


def test_one_column_is_not_spread_over_the_width():
    refused(rows(5), [rows(3, hidden=1)], mask_of(".xxx."), "item 0", "[3, 1]", f"[tokens, {HIDDEN}]")


def test_many_items_are_counted_without_listing_them_all():
    refused(rows(5), [rows(1)] * 300, mask_of(".xxx."), "(300 items) = 300 embedding rows for 3")


def test_each_wrong_item_is_named():
    items = [rows(1), rows(1, hidden=8), torch.ones(4), torch.ones(1, 4, dtype=torch.int64), "picture"]
    texts = ("4 problems", "item 1", "[1, 8]", "item 2", "[4]", "item 3", "int64[1, 4]", "item 4", "is a str")
    refused(rows(5), items, mask_of("xxxxx"), *texts)


@pytest.mark.parametrize("wrong, says", [(rows(3), "one float32[3, 4]"), (torch.ones(4), "[4]"), ({"a": 1}, "dict")])
def test_other_kinds_of_embeddings_are_refused(wrong, says):
    refused(rows(5), wrong, mask_of(".xxx."), says)


def test_an_item_on_another_device_is_refused_by_name():
    refused(rows(5), [rows(3).to("meta")], mask_of(".xxx."), "item 0", "meta", "cpu")


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([0, 1, 1, 1, 0]),
        torch.tensor([[False, True, True, True, False]]),
        torch.tensor([[False], [True], [True], [True], [False]]),
        torch.tensor([False, True, True, True]),
    ],
)
def test_a_mask_that_is_not_one_bool_per_token_is_refused(mask):
    refused(rows(5), [rows(3)], mask, "is_multimodal", "bool[5]")
    with pytest.raises(ContractError, match="is_multimodal"):
        embed_text_rows(torch.arange(5), lambda ids: rows(len(ids)), mask)


@pytest.mark.parametrize(
    "value, source, target, fits",
    [
        (65504.0, torch.float32, torch.float16, True),
        (70000.0, torch.float32, torch.float16, False),
        (-70000.0, torch.bfloat16, torch.float16, False),
        (1e39, torch.float64, torch.float32, False),
        (3.4e38, torch.float32, torch.bfloat16, False),
        (3.3e38, torch.float32, torch.bfloat16, True),
        (float("inf"), torch.float32, torch.float16, True),
        (float("nan"), torch.float32, torch.float16, True),
    ],
)
def test_a_cast_may_not_turn_a_finite_value_into_infinity(value, source, target, fits):
    good, item = rows(1, dtype=source), rows(2, dtype=source)
    item[1, 2] = value
    embeds, mask = rows(5, dtype=target), mask_of(".xxx.")
    if fits:
        merged = _merge_multimodal_embeddings(embeds, [good, item], mask)
        assert torch.equal(merged[3], item[1].to(target)) or value != value
    else:
        refused(embeds, [good, item], mask, "item 1", "1 values", str(target), f"{abs(float(item[1, 2])):.4g}")


def test_embeddings_without_a_mask_are_refused():
    with pytest.raises(ContractError, match=r"is_multimodal(.|\n)*fix: "):
        _require_is_multimodal(None)
    mask = mask_of("x.")
    assert _require_is_multimodal(mask) is mask


@given(mask=st.lists(st.booleans(), min_size=1, max_size=16), seed=st.integers(0, 2**16))
def test_text_rows_alone_are_looked_up(mask, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(10, HIDDEN, generator=generator)
    is_multimodal = torch.tensor(mask)
    ids = torch.randint(0, 10, (len(mask),), generator=generator)
    ids[is_multimodal] = 10**6
    asked = []

    def embed(input_ids):
        asked.append(input_ids)
        return table[input_ids]

    kept = is_multimodal.clone()
    found = embed_text_rows(ids, embed, is_multimodal)
    expected = torch.zeros(len(mask), HIDDEN)
    for place, marked in enumerate(mask):
        if not marked:
            expected[place] = table[ids[place]]
    assert torch.equal(found, expected)
    assert torch.equal(torch.cat(asked), ids[~kept])
    assert torch.equal(is_multimodal, kept) and is_multimodal.shape == (len(mask),)


def test_placeholder_rows_are_zero_whatever_memory_held():
    for _ in range(8):
        rubbish = torch.full((512, 64), float("nan"))
        del rubbish
        found = embed_text_rows(torch.arange(512), lambda ids: torch.ones(len(ids), 64), torch.arange(512) > 0)
        assert torch.equal(found[1:], torch.zeros(511, 64))


def test_an_embedding_that_drops_rows_is_named():
    with pytest.raises(ContractError, match=r"embed_input_ids.*float32\[1, 4\].*2 token ids"):
        embed_text_rows(torch.tensor([1, 2, 3]), lambda ids: rows(1), mask_of(".x."))


def test_gradients_reach_text_and_items():
    table = torch.randn(10, HIDDEN, requires_grad=True)
    item = torch.randn(2, HIDDEN, requires_grad=True)
    mask = mask_of(".xx.")
    text = embed_text_rows(torch.tensor([1, 99, 99, 2]), lambda ids: table[ids], mask)
    _merge_multimodal_embeddings(text, [item], mask).sum().backward()
    assert torch.equal(item.grad, torch.ones(2, HIDDEN))
    assert torch.equal(table.grad.sum(1).nonzero().squeeze(1), torch.tensor([1, 2]))
