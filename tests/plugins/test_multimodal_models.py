"""The vision-language models built by hand: parts that are left out, names of parameters, refusals."""

from __future__ import annotations

import pytest
import torch
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, MultiModalConfig, VllmConfig
from torchplug.errors import CheckpointError, ContractError
from torchplug.interfaces import MultiModalFeatureSpec, PlaceholderRange
from torchplug.layers import Attention, MRotaryEmbedding, WeightsMismatch
from torchplug_models.llava import LlavaForConditionalGeneration
from torchplug_models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration, window_tokens
from torchplug_models.qwen2_vl import Qwen2VLForConditionalGeneration
from torchplug_models.qwen3_vl import Qwen3VLForConditionalGeneration, bilinear_places

QWEN = [Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration]
ALL = [*QWEN, LlavaForConditionalGeneration]


def build(cls, multimodal=None, prefix="", **changes):
    config = HfConfig(cls.tiny_config() | changes, source="x/config.json", defaults=cls.config_defaults)
    model_config = ModelConfig("x", config, torch.float32, 256, multimodal)
    vllm_config = VllmConfig(model_config, DeviceConfig(torch.device("cpu")))
    return cls(vllm_config=vllm_config, prefix=prefix).eval()


def changed(cls, part, **values):
    return {part: cls.tiny_config()[part] | values}


def checkpoint(module):
    """Random tensors for every parameter, under the module's own names."""
    return {name: torch.randn_like(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("cls", ALL)
def test_where_every_limit_is_0_the_tower_has_no_weights_and_its_tensors_are_left(cls):
    whole, limits = build(cls), MultiModalConfig({"image": 0, "video": 0})
    without = build(cls, limits)
    names = {name for name, _ in without.named_parameters()}
    assert names == {name for name, _ in whole.named_parameters() if name.startswith("language_model.")}
    tensors = checkpoint(whole)
    assert without.load_weights(tensors.items()) >= names
    whole.load_weights(tensors.items())
    ids = torch.arange(7)
    with torch.inference_mode():
        assert torch.equal(without(ids, ids), whole(ids, ids))
        with pytest.raises(ContractError, match="built without it"):
            without.embed_multimodal(pixel_values=torch.zeros(1, 3, 16, 16), image_grid_thw=torch.tensor([[1, 2, 2]]))


@pytest.mark.parametrize("cls", QWEN)
def test_a_tower_that_one_modality_still_needs_is_built(cls):
    module = build(cls, MultiModalConfig({"image": 0}))
    assert any(name.startswith("visual.") for name, _ in module.named_parameters())


@pytest.mark.parametrize("cls", ALL)
def test_with_the_encoder_only_the_language_model_has_no_weights(cls):
    module = build(cls, MultiModalConfig(mm_encoder_only=True))
    assert not any(name.startswith("language_model.") for name, _ in module.named_parameters())
    assert module.load_weights(checkpoint(build(cls)).items()) == set(dict(module.named_parameters()))


@pytest.mark.parametrize("cls", ALL)
def test_each_attention_layer_knows_its_name(cls):
    prefixes = [layer.prefix for layer in build(cls, prefix="outer").modules() if isinstance(layer, Attention)]
    assert prefixes == [f"outer.language_model.model.layers.{index}.self_attn.attn" for index in range(2)]


@pytest.mark.parametrize("cls", ALL)
def test_placeholder_texts(cls):
    texts = {modality: cls.get_placeholder_str(modality, 1) for modality in ("image", "video", "audio")}
    assert texts["audio"] is None and texts["image"]
    assert (texts["video"] is None) == (cls is LlavaForConditionalGeneration)


@pytest.mark.parametrize("cls", QWEN)
def test_without_a_section_the_model_is_refused(cls):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="mrope_section"):
        build(cls, **changed(cls, "text_config", **rope))


@pytest.mark.parametrize("cls", QWEN)
def test_the_rotary_embedding_takes_three_rows(cls):
    rotary = build(cls).language_model.model.rotary_emb
    assert isinstance(rotary, MRotaryEmbedding)
    interleaved = cls is Qwen3VLForConditionalGeneration
    assert rotary.row_of_pair.tolist() == ([0, 1, 2, 0, 1, 2, 0, 0] if interleaved else [0, 0, 1, 1, 1, 2, 2, 2])


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (changed(LlavaForConditionalGeneration, "text_config", model_type="gemma"), "text_config.model_type"),
        (changed(LlavaForConditionalGeneration, "vision_config", model_type="pixtral"), "vision_config.model_type"),
        ({"vision_feature_layer": 3}, "vision_feature_layer"),
        ({"vision_feature_layer": [-2, -4]}, "vision_feature_layer"),
        ({"vision_feature_layer": []}, "vision_feature_layer"),
    ],
)
def test_llava_refuses_by_key_what_it_does_not_have(changes, where):
    with pytest.raises(CheckpointError) as caught:
        build(LlavaForConditionalGeneration, **changes)
    assert [problem.where for problem in caught.value.problems] == [where]


def test_llava_builds_the_layers_that_are_read_and_leaves_the_others_of_the_file():
    first, last = (build(LlavaForConditionalGeneration, vision_feature_layer=layer) for layer in (0, -1))
    assert len(first.vision_tower.encoder.layers) == 0 and len(last.vision_tower.encoder.layers) == 2
    assert first.load_weights(checkpoint(last).items()) == set(dict(first.named_parameters()))
    with pytest.raises(WeightsMismatch, match=r"encoder\.layers\.5"):
        name = "vision_tower.encoder.layers.5.mlp.fc1.bias"
        first.load_weights([*checkpoint(last).items(), (name, torch.zeros(48))])


@pytest.mark.parametrize("cls", QWEN)
def test_a_grid_with_another_number_of_tokens_than_its_place_is_refused(cls):
    place = PlaceholderRange(1, 5)
    feature = MultiModalFeatureSpec("image", place, {"image_grid_thw": torch.tensor([1, 4, 4])})
    with pytest.raises(ContractError, match=r"image_grid_thw of the image at token 1: \[1, 4, 4\] makes 4 tokens"):
        build(cls).get_mrope_input_positions([0] * 8, [feature])


def test_windows_cover_every_token_once_and_are_smaller_at_the_edge():
    windows = [window.tolist() for window in window_tokens([(1, 6, 10), (2, 4, 4)], 2, 2)]
    assert windows[:6] == [[0, 1, 5, 6], [2, 3, 7, 8], [4, 9], [10, 11], [12, 13], [14]]
    assert windows[6:] == [[15, 16, 17, 18], [19, 20, 21, 22]]


def test_a_table_of_its_own_size_is_taken_as_it_is():
    side = 4
    positions = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).view(2, -1)
    places, weights = bilinear_places(positions, torch.full((2, 16), side), side)
    table = torch.randn(16)
    torch.testing.assert_close((table[places] * weights).sum(0), table)


def test_qwen3_embeds_text_narrow_and_items_wide():
    module = build(Qwen3VLForConditionalGeneration)
    module.load_weights(checkpoint(module).items())
    ids = torch.tensor([1, 122, 122, 2])
    mask = ids == 122
    with torch.inference_mode():
        narrow = module.embed_input_ids(ids)
        rows = torch.randn(2, 3 * 64)
        wide = module.embed_input_ids(ids, [rows], is_multimodal=mask)
        assert narrow.shape == (4, 64) and wide.shape == (4, 192)
        assert torch.equal(wide[mask], rows) and torch.equal(wide[~mask][:, :64], narrow[~mask])
        assert not wide[~mask][:, 64:].any()
        text = module(ids[~mask], torch.arange(2))
        assert torch.equal(module(None, torch.arange(2), None, torch.nn.functional.pad(narrow[~mask], (0, 128))), text)
        with pytest.raises(ContractError, match="is_multimodal"):
            module.embed_input_ids(ids, [rows])
        with pytest.raises(ContractError, match="expected floating"):
            module.embed_input_ids(ids, [rows[:, :64]], is_multimodal=mask)
