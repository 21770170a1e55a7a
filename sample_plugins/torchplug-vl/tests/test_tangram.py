"""Tangram conforms, and what its processor, its positions and its tower do is what its pages say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, MultiModalConfig, VllmConfig
from torchplug.errors import RequestError
from torchplug.layers.stages import StageMissingLayer
from torchplug.multimodal import MULTIMODAL_REGISTRY, MultiModalInputProcessor, ProcessorContext
from torchplug.testing import conformance
from torchplug_vl import TangramForConditionalGeneration as Tangram

test_conforms = conformance("TangramForConditionalGeneration")

OPEN, CLOSE, ROW, TILE = 60, 61, 62, 64


@pytest.fixture
def model(torchplug_tiny):
    return torchplug_tiny("TangramForConditionalGeneration")


def inputs():
    config = HfConfig(Tangram.tiny_config(), source="config.json", defaults=Tangram.config_defaults)
    return MultiModalInputProcessor(MULTIMODAL_REGISTRY.create_processor(Tangram, ProcessorContext(config)))


def picture(rows, columns, seed=0, margin=0):
    shape = (rows * 8 + margin, columns * 8 + margin, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def test_an_image_becomes_rows_of_tiles():
    made = inputs()([1, TILE, 2], {"image": picture(2, 3, margin=5)})
    assert made.token_ids == [1, OPEN, TILE, TILE, TILE, ROW, TILE, TILE, TILE, ROW, CLOSE, 2]
    (feature,) = made.features
    assert (feature.mm_position.offset, feature.mm_position.length, feature.mm_position.num_embeds) == (1, 10, 6)
    pixels = torch.tensor(picture(2, 3, margin=5)).float() / 127.5 - 1
    expected = pixels[8:16, 16:24].permute(2, 0, 1).flatten()  # the last tile: second row, third column
    assert torch.equal(feature.data["tiles"][5], expected)


@pytest.mark.parametrize("shape", [(7, 80, 3), (8 * 9, 8 * 8, 3)])
def test_an_image_with_no_tile_or_too_many_is_refused(shape):
    with pytest.raises(RequestError, match="image 1 of 1: cannot be used: it has"):
        inputs()([TILE], {"image": np.zeros(shape, np.uint8)})


def test_positions_by_hand(model):
    made = inputs()([1, TILE, 2], {"image": picture(2, 1)})
    assert made.token_ids == [1, OPEN, TILE, ROW, TILE, ROW, CLOSE, 2]
    positions, delta = model.hooks.get_mrope_input_positions(made.token_ids, list(made.features))
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5],
        [0, 1, 2, 2, 3, 3, 4, 5],
        [0, 1, 2, 3, 2, 3, 4, 5],
    ]
    assert delta == -2


def test_a_placeholder_outside_the_vocabulary_is_never_looked_up(model):
    made = inputs()([1, TILE, 2], {"image": picture(1, 2)})
    rows = model.hooks.embed_multimodal(**inputs().embed_kwargs(made.features))
    ids = torch.tensor(made.token_ids)
    mask = ids == TILE
    merged = model.hooks.embed_input_ids(ids, rows, is_multimodal=mask, handle_oov_mm_token=True)
    assert torch.equal(merged[mask], rows[0])
    assert torch.equal(merged[~mask], model.hooks.embed_input_ids(ids[~mask]))
    with pytest.raises(IndexError):
        model.hooks.embed_input_ids(ids, rows, is_multimodal=mask)


def test_every_tile_counts_and_so_does_its_place(model):
    def embedded(image):
        made = inputs()([TILE], {"image": image})
        with torch.inference_mode():
            return model.hooks.embed_multimodal(**inputs().embed_kwargs(made.features))[0]

    plain = picture(2, 2)
    swapped = plain.copy()
    swapped[:8], swapped[8:] = plain[8:], plain[:8]
    before, after = embedded(plain), embedded(swapped)
    assert not torch.allclose(before, after) and not torch.allclose(before, after[[2, 3, 0, 1]])


def test_where_no_image_may_come_the_tower_is_not_built():
    hf_config = HfConfig(Tangram.tiny_config(), source="config.json", defaults=Tangram.config_defaults)
    for limit, built in ((0, False), (1, True)):
        config = ModelConfig("x", hf_config, torch.float32, 64, MultiModalConfig({"image": limit}))
        module = Tangram(vllm_config=VllmConfig(config, DeviceConfig(torch.device("cpu"))))
        assert isinstance(module.tower, StageMissingLayer) is not built
        assert any(name.startswith("tower.") for name, _ in module.named_parameters()) is built
