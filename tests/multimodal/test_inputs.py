"""Prompts with items: expansion, counts, limits, hashes, what is kept; every problem of a request at once, by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchplug.config import HfConfig, MultiModalConfig
from torchplug.errors import ContractError, RequestError
from torchplug.interfaces import PlaceholderRange
from torchplug.multimodal import (
    Batching,
    MultiModalInputProcessor,
    MultiModalProcessor,
    ProcessedItem,
    ProcessorContext,
    Video,
)

IMAGE, VIDEO, START, END = 90, 91, 92, 93


class Counting(MultiModalProcessor):
    """An image takes as many tokens as it has rows; a film [START, VIDEO] becomes START, its frames, END."""

    modalities = ("image", "video", "audio")
    fields = {
        "pixels": Batching.CONCATENATE,
        "size": Batching.STACK,
        "frames": Batching.LIST,
        "wave": Batching.CONCATENATE,
    }

    def __init__(self, context):
        super().__init__(context)
        self.processed = 0

    def placeholder(self, modality):
        return {"image": [IMAGE], "video": [START, VIDEO], "audio": [START, START]}[modality]

    def process(self, modality, item):
        self.processed += 1
        if modality == "audio":
            return ProcessedItem([START] * len(item), {"wave": torch.tensor(item)})
        if modality == "image":
            if len(item) > 20:
                raise ValueError("more than 20 rows")
            pixels = torch.tensor(item).float().mean((1, 2))
            return ProcessedItem([IMAGE] * len(item), {"pixels": pixels, "size": torch.tensor(item.shape)})
        count = len(item.frames)
        tokens = [START, *[VIDEO] * count, END]
        return ProcessedItem(tokens, {"frames": torch.tensor(item.frames)}, torch.tensor(tokens) == VIDEO)


def make(config=None, cls=Counting, texts=None):
    return MultiModalInputProcessor(cls(ProcessorContext(HfConfig({}, source="x"))), config, texts)


def picture(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (rows, 2, 3), dtype=np.uint8)


def film(frames, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (frames, 2, 2, 3), dtype=np.uint8)


def problems(inputs, ids, data=None):
    with pytest.raises(RequestError) as caught:
        inputs(ids, data)
    return {problem.where: problem.says for problem in caught.value.problems}


def test_placeholders_become_their_items_tokens_in_order():
    made = make()([1, IMAGE, 2, START, VIDEO, 3, IMAGE], {"video": [film(2)], "image": [picture(3), picture(1)]})
    assert made.token_ids == [1, IMAGE, IMAGE, IMAGE, 2, START, VIDEO, VIDEO, END, 3, IMAGE]
    assert [(f.modality, f.mm_position.offset, f.mm_position.length) for f in made.features] == [
        ("image", 1, 3),
        ("video", 5, 4),
        ("image", 10, 1),
    ]
    assert made.features[1].mm_position == PlaceholderRange(5, 4, torch.tensor([False, True, True, False]))
    assert made.features[1].mm_position.num_embeds == 2


@given(rows=st.lists(st.integers(1, 5), max_size=4), texts=st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_every_item_is_where_its_feature_says(rows, texts):
    ids, words = [], iter(range(80))
    for number, length in enumerate(texts[: len(rows) + 1]):
        ids += [next(words) for _ in range(length)] + ([IMAGE] if number < len(rows) else [])
    made = make()(ids, {"image": [picture(count, seed) for seed, count in enumerate(rows)]})
    assert [token for token in made.token_ids if token != IMAGE] == [token for token in ids if token != IMAGE]
    assert [f.mm_position.length for f in made.features] == rows
    covered = [f.mm_position.offset + i for f in made.features for i in range(f.mm_position.length)]
    assert covered == [at for at, token in enumerate(made.token_ids) if token == IMAGE]


def test_one_item_or_a_list_of_items():
    inputs = make()
    for given_data in (picture(2), [picture(2)], (picture(2),), picture(2)[None]):
        assert inputs([IMAGE], {"image": given_data}).token_ids == [IMAGE] * 2
    assert len(inputs([IMAGE, IMAGE], {"image": np.stack([picture(2), picture(2)])}).features) == 2
    fast = (film(3), {"fps": 2})
    for given_data in (film(3), [film(3)], list(film(3)), fast, [fast], Video(film(3))):
        (feature,) = inputs([START, VIDEO], {"video": given_data}).features
        assert feature.mm_position.num_embeds == 3
    assert len(inputs([START, VIDEO] * 2, {"video": [film(3), list(film(2))]}).features) == 2
    assert inputs([START, START], {"audio": np.arange(4)}).token_ids == [START] * 4


def test_text_alone_costs_nothing_and_is_as_it_was():
    inputs = make()
    for data in (None, {}, {"image": []}, {"image": None}):
        made = inputs([1, 2, 3], data)
        assert made.token_ids == [1, 2, 3] and made.features == ()
    assert inputs.processor.processed == 0


@pytest.mark.parametrize(
    ("ids", "data", "where", "says"),
    [
        ([1, IMAGE], None, "image", "the prompt has 1 placeholder, and 0 items came"),
        ([1, 2], {"image": [picture(2)]}, "image", "the prompt has 0 placeholders, and 1 item came"),
        ([IMAGE] * 3, {"image": [picture(2)]}, "image", "the prompt has 3 placeholders, and 1 item came"),
        ([IMAGE, VIDEO], {"image": [picture(2)]}, "token 1", "is 91, which stands for part of an item"),
        ([START, VIDEO], {"image": [picture(2)]}, "video", "the prompt has 1 placeholder, and 0 items came"),
        ([1], {"smell": [1]}, "smell", "is a modality that this model does not take"),
    ],
)
def test_items_and_placeholders_that_differ_are_refused(ids, data, where, says):
    assert says in problems(make(), ids, data)[where]


def test_the_fix_shows_what_to_write():
    with pytest.raises(RequestError, match="write '<image>' once for each item"):
        make(texts={"image": "<image>"})([1], {"image": picture(2)})
    with pytest.raises(RequestError, match=r"write token ids \[90\] once"):
        make()([1], {"image": picture(2)})


def test_every_bad_item_is_named_and_good_ones_are_not():
    found = problems(
        make(), [IMAGE] * 4, {"image": [picture(2), "no/such.png", picture(21), np.zeros((0, 2, 3), np.uint8)]}
    )
    assert set(found) == {"image 2 of 4 (no/such.png)", "image 3 of 4", "image 4 of 4"}
    assert found["image 3 of 4"] == "cannot be used: more than 20 rows"


def test_limits_are_checked_before_anything_is_decoded():
    inputs = make(MultiModalConfig(limit_per_prompt={"image": 2, "video": 0}))
    assert len(inputs([IMAGE] * 2, {"image": ["x"] * 0 + [picture(1), picture(2)]}).features) == 2
    found = problems(inputs, [IMAGE] * 3, {"image": ["no/such.png"] * 3, "video": [film(2)]})
    assert found == {
        "image": "3 items in one prompt; limit_mm_per_prompt allows 2",
        "video": "1 items in one prompt; limit_mm_per_prompt allows 0",
    }


def test_a_request_that_is_refused_leaves_the_next_one_alone():
    inputs = make()
    good = inputs([IMAGE], {"image": picture(3)})
    problems(inputs, [IMAGE], {"image": picture(30)})
    again = inputs([IMAGE], {"image": picture(3)})
    assert again.token_ids == good.token_ids and again.features[0].identifier == good.features[0].identifier


# Names of contents


def name_of(inputs, ids, data):
    return inputs(ids, data).features[0].identifier


def test_the_same_content_has_the_same_name_and_is_processed_once():
    inputs = make()
    names = {name_of(inputs, [1, IMAGE], {"image": picture(3).copy()}) for _ in range(3)}
    assert len(names) == 1 and len(names.pop()) == 32 and inputs.processor.processed == 1
    assert name_of(make(), [IMAGE], {"image": picture(3)}) == name_of(inputs, [IMAGE], {"image": picture(3)})


def test_other_content_shape_kind_speed_or_settings_have_another_name():
    inputs = make()
    changed = picture(3)
    changed[2, 1, 2] ^= 1
    names = [
        name_of(inputs, [IMAGE], {"image": picture(3)}),
        name_of(inputs, [IMAGE], {"image": changed}),
        name_of(inputs, [IMAGE], {"image": picture(3).reshape(6, 1, 3)}),
        name_of(inputs, [START, VIDEO], {"video": picture(3)[None]}),
        name_of(inputs, [START, VIDEO], {"video": (picture(3)[None], {"fps": 1.0})}),
        name_of(inputs, [START, VIDEO], {"video": (picture(3)[None], {"fps": 2.0})}),
    ]

    class Other(Counting):
        pass

    class Set(Counting):
        def settings(self):
            return {"size": 3}

    names += [name_of(make(cls=cls), [IMAGE], {"image": picture(3)}) for cls in (Other, Set)]
    assert len(set(names)) == len(names)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr("torchplug.multimodal.inputs._KEPT_BYTES", 100)
    inputs = make()
    for seed in range(50):
        inputs([IMAGE], {"image": picture(5, seed)})  # 5 floats and 3 ints: 44 bytes
    assert len(inputs._kept) == 2 and inputs._kept_bytes == 88
    before = inputs.processor.processed
    inputs([IMAGE], {"image": picture(5, 49)})
    assert inputs.processor.processed == before
    inputs([IMAGE], {"image": picture(5, 0)})
    assert inputs.processor.processed == before + 1


# Batches for the tower


def test_items_of_several_requests_become_the_keywords_of_the_tower():
    inputs = make()
    one = inputs([IMAGE, IMAGE], {"image": [picture(2), picture(4)]})
    other = inputs([START, VIDEO, IMAGE], {"image": [picture(1)], "video": [film(2)]})
    images = [f for f in (*one.features, *other.features) if f.modality == "image"]
    kwargs = inputs.embed_kwargs(images)
    assert set(kwargs) == {"pixels", "size"}
    assert kwargs["pixels"].shape == (7,) and kwargs["size"].tolist() == [[2, 2, 3], [4, 2, 3], [1, 2, 3]]
    (frames,) = inputs.embed_kwargs([other.features[0]])["frames"]
    assert frames.shape == (2, 2, 2, 3)


def test_a_processor_that_breaks_its_promise_is_named():
    class Unnamed(Counting):
        fields = {"pixels": Batching.CONCATENATE}

    inputs = make(cls=Unnamed)
    made = inputs([IMAGE], {"image": picture(2)})
    with pytest.raises(ContractError, match=r"Unnamed.process: gives pixels, size"):
        inputs.embed_kwargs(made.features)

    class Short(Counting):
        def process(self, modality, item):
            return ProcessedItem([IMAGE, IMAGE], {"pixels": torch.zeros(1)}, torch.ones(3, dtype=torch.bool))

    with pytest.raises(ContractError, match=r"Short.process"):
        make(cls=Short)([IMAGE], {"image": picture(2)})

    class Same(Counting):
        def placeholder(self, modality):
            return [IMAGE]

    with pytest.raises(ContractError, match=r"Same.placeholder"):
        make(cls=Same)

    class Empty(Counting):
        def placeholder(self, modality):
            return []

    with pytest.raises(ContractError, match=r"Empty.placeholder"):
        make(cls=Empty)


def test_the_longer_of_two_placeholders_that_begin_alike_is_found():
    class Nested(Counting):
        modalities = ("image", "video")

        def placeholder(self, modality):
            return [IMAGE] if modality == "image" else [IMAGE, VIDEO]

    made = make(cls=Nested)([IMAGE, VIDEO, IMAGE], {"image": picture(2), "video": film(1)})
    assert [f.modality for f in made.features] == ["video", "image"]
