"""Items of a step: which rows a chunk reads, one call per modality, counts before merging, a bad item blamed alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchplug.config import HfConfig
from torchplug.engine.encoder_cache import EncoderCache
from torchplug.engine.item_embedder import ItemEmbedder
from torchplug.engine.mrope_table import MRopeTable
from torchplug.engine.prompt_items import PromptItems
from torchplug.errors import ContractError
from torchplug.interfaces import MultiModalFeatureSpec, PlaceholderRange
from torchplug.layers import GridSpan, mrope_positions
from torchplug.multimodal import (
    Batching,
    MultiModalInputProcessor,
    MultiModalProcessor,
    ProcessedItem,
    ProcessorContext,
)


class Ramp(MultiModalProcessor):
    """Embeddings of an item are its value, then value + 1, ...: they tell where they come from."""

    modalities = ("image", "video")
    fields = {"value": Batching.STACK, "count": Batching.STACK}

    def placeholder(self, modality):
        return [90 if modality == "image" else 91]

    def process(self, modality, item):
        return ProcessedItem([90], {})


def feature(name, value, offset, is_embed, modality="image"):
    mask = None if all(is_embed) else torch.tensor(is_embed)
    data = {"value": torch.tensor(value), "count": torch.tensor(sum(is_embed))}
    return MultiModalFeatureSpec(modality, PlaceholderRange(offset, len(is_embed), mask), data, name)


class Tower:
    def __init__(self):
        self.calls = []

    def __call__(self, value, count):
        self.calls.append(value.tolist())
        if (value < 0).any():
            raise RuntimeError("a value below 0")
        return [v + torch.arange(int(n))[:, None].float().expand(-1, 2) for v, n in zip(value, count, strict=True)]


def embedder(max_rows=100):
    tower, cache = Tower(), EncoderCache(max_rows)
    inputs = MultiModalInputProcessor(Ramp(ProcessorContext(HfConfig({}, source="x"))))
    return ItemEmbedder(tower, inputs, cache, "model 'M'"), tower, cache


def held(cache, *features):
    for each in features:
        assert cache.hold("request", each.identifier, each.mm_position.num_embeds)
    return features


def test_items_of_one_modality_are_one_call_and_none_is_encoded_twice():
    made, tower, cache = embedder()
    features = held(
        cache, feature("a", 10, 0, [True] * 3), feature("b", 20, 5, [True]), feature("f", 30, 9, [True], "video")
    )
    again = feature("a", 10, 40, [True] * 3)
    assert made.encode([*features, again]) == {}
    assert tower.calls == [[10, 20], [30]] and cache.num_encoded == 3
    assert made.encode([*features, again]) == {} and len(tower.calls) == 2


def test_a_bad_item_is_blamed_alone():
    made, tower, cache = embedder()
    features = held(cache, feature("a", 10, 0, [True]), feature("b", -1, 2, [True]), feature("c", 5, 4, [True]))
    errors = made.encode(features)
    assert list(errors) == ["b"] and isinstance(errors["b"], RuntimeError)
    assert tower.calls == [[10, -1, 5], [10], [-1], [5]]
    assert cache.is_encoded("a") and cache.is_encoded("c") and not cache.is_encoded("b")


def test_rows_are_counted_item_by_item():
    made, _, cache = embedder()
    features = held(cache, feature("a", 10, 0, [True] * 2), feature("b", 20, 5, [True] * 3))
    made._embed = lambda **kwargs: [torch.zeros(2, 2), torch.zeros(1, 2)]
    errors = made.encode(features)
    assert list(errors) == ["b"] and isinstance(errors["b"], ContractError)
    assert "float32[1, 2] on cpu for a image with 3 places" in str(errors["b"])
    assert cache.is_encoded("a")


def test_another_number_of_embeddings_than_items_is_tried_one_by_one():
    made, _, cache = embedder()
    features = held(cache, feature("a", 10, 0, [True]), feature("b", 20, 5, [True]))
    made._embed = lambda value, count: [torch.zeros(1, 2)]
    assert made.encode(features) == {} and cache.num_encoded == 2
    made, _, cache = embedder()
    features = held(cache, feature("a", 10, 0, [True]))
    made._embed = lambda **kwargs: []
    assert "returned 0 embeddings for 1 image items" in str(made.encode(features)["a"])


ITEM = st.tuples(st.integers(0, 3), st.lists(st.booleans(), min_size=1, max_size=6).filter(any))


@given(layout=st.lists(ITEM, min_size=1, max_size=4), cut=st.data())
def test_every_cut_of_a_prompt_reads_the_rows_that_one_step_reads(layout, cut):
    made, _, cache = embedder()
    features, offset = [], 0
    expected = []
    for index, (gap, is_embed) in enumerate(layout):
        expected += [0.0] * gap
        offset += gap
        features.append(feature(f"i{index}", 100 * (index + 1), offset, is_embed))
        ramp = iter(range(100 * (index + 1), 100 * (index + 1) + 10))
        expected += [float(next(ramp)) if embeds else 0.0 for embeds in is_embed]
        offset += len(is_embed)
    made.encode(held(cache, *features))
    items = PromptItems(features[::-1])
    cuts = sorted({0, offset, *cut.draw(st.lists(st.integers(0, offset), max_size=4))})
    found = torch.zeros(offset, 2)
    for start, stop in pairwise(cuts):
        part = made.rows([(None, 0, 2), (items, start, stop), (None, 3, 4)])
        reads = [f.identifier for f in items.read_in(start, stop)]
        if part is None:
            assert reads == []
            continue
        rows, mask = part
        assert mask.shape == (stop - start + 3,) and mask.dtype == torch.bool and not mask[:2].any() and not mask[-1]
        assert int(mask.sum()) == sum(len(one) for one in rows) and len(reads) == len(rows)
        found[start:stop][mask[2:-1]] = torch.cat(rows)
    assert found[:, 0].tolist() == expected


def test_items_of_several_requests_go_to_their_own_places():
    made, _, cache = embedder()
    one, other = feature("a", 10, 1, [True] * 2), feature("b", 20, 0, [True] * 2)
    made.encode(held(cache, one, other))
    rows, mask = made.rows([(PromptItems([one]), 0, 4), (PromptItems([other]), 1, 3)])
    assert mask.tolist() == [False, True, True, False, True, False]
    assert torch.cat(rows)[:, 0].tolist() == [10, 11, 21]


def test_items_whose_ranges_overlap_are_merged_token_by_token():
    made, _, cache = embedder()
    film = feature("f", 10, 1, [True, False, True, True], "video")
    sound = feature("s", 50, 2, [True, False, False, True], "image")
    made.encode(held(cache, film, sound))
    rows, mask = made.rows([(PromptItems([film, sound]), 0, 7)])
    assert mask.tolist() == [False, True, True, True, True, True, False]
    assert torch.cat(rows)[:, 0].tolist() == [10, 50, 11, 12, 51]


def test_what_is_done_and_what_a_block_holds():
    one, other = feature("a", 10, 2, [False, True, True, False]), feature("b", 20, 8, [True])
    items = PromptItems([one, other])
    assert [f.identifier for f in items.done_before(4)] == []
    assert [f.identifier for f in items.done_before(5)] == ["a"]
    assert [f.identifier for f in items.done_before(9)] == ["a", "b"]
    assert items.content_in(0, 4) == (("a", -2),)
    assert items.content_in(4, 8) == (("a", 2),)
    assert items.content_in(4, 12) == (("a", 2), ("b", -4))
    assert items.content_in(12, 16) == ()


# Positions


@given(
    grid=st.tuples(*[st.integers(1, 3)] * 3),
    before=st.integers(0, 4),
    after=st.integers(0, 4),
    more=st.integers(0, 5),
    cuts=st.lists(st.integers(0, 40), max_size=5),
)
def test_chunks_and_decodes_take_the_columns_of_the_table_and_go_on_by_the_delta(grid, before, after, more, cuts):
    span = GridSpan(before, grid)
    prompt = before + span.num_tokens + after
    positions, delta = mrope_positions(prompt, [span])
    table, total = MRopeTable(positions, delta), prompt + more
    assert table.num_rows == 3
    expected = np.concatenate([positions.numpy(), np.tile(np.arange(prompt, total) + delta, (3, 1))], axis=1)
    edges = sorted({0, total, *(cut for cut in cuts if cut < total)})
    found = np.full((3, total), -1)
    for start, stop in pairwise(edges):
        table.fill(found[:, start:stop], start, stop)
    assert np.array_equal(found, expected)
    if more:
        assert int(found[:, prompt:].min()) > int(found[:, :prompt].max())


def test_a_step_of_no_tokens_writes_nothing():
    MRopeTable(torch.zeros(3, 4, dtype=torch.int64), 0).fill(np.zeros((3, 0), np.int64), 2, 2)


def test_rows_of_an_item_that_was_never_encoded_are_a_fault_of_ours():
    made, _, cache = embedder()
    one = feature("a", 10, 0, [True])
    held(cache, one)
    with pytest.raises(AssertionError, match="encoded in the step"):
        made.rows([(PromptItems([one]), 0, 1)])
