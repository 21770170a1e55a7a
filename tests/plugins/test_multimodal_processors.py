"""The first-party processors give what transformers' own give: expanded ids, pixels, grids; and their refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torchplug.config import HfConfig, MultiModalConfig
from torchplug.errors import CheckpointError, RequestError
from torchplug.multimodal import MULTIMODAL_REGISTRY, MultiModalInputProcessor, ProcessorContext, Video
from torchplug_models.llava import LlavaForConditionalGeneration
from torchplug_models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from torchplug_models.qwen2_vl import Qwen2VLForConditionalGeneration
from torchplug_models.qwen3_vl import Qwen3VLForConditionalGeneration

QWEN = [Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration]
ALL = [*QWEN, LlavaForConditionalGeneration]
START, END, IMAGE, VIDEO = 256, 257, 258, 259
TOKENS = {
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_token_index": IMAGE,
}
SETTINGS = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
}


def tokenizer(llava=False):
    """A token for every byte, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    image = "<image>" if llava else "<|image_pad|>"
    backend.add_special_tokens(["<|vision_start|>", "<|vision_end|>", image, "<|video_pad|>"])
    return backend


def view(cls, **changes):
    return HfConfig(cls.tiny_config() | TOKENS | changes, source="config.json", defaults=cls.config_defaults)


def inputs_of(cls, directory=None, config=None, **changes):
    backend = tokenizer(cls is LlavaForConditionalGeneration)
    context = ProcessorContext(
        view(cls, **changes), directory, lambda text: backend.encode(text, add_special_tokens=False).ids
    )
    return MultiModalInputProcessor(MULTIMODAL_REGISTRY.create_processor(cls, context), config), backend


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def written(tmp_path, cls=transformers.Qwen2VLImageProcessorPil, **settings):
    cls(**settings).save_pretrained(tmp_path)
    return tmp_path


class WithoutVideo(transformers.Qwen2VLProcessor):
    """transformers' processor can be built without torchvision only if nobody looks at its video processor."""

    def check_argument_for_proper_class(self, name, argument):
        return None


@pytest.mark.parametrize("cls", QWEN)
def test_images_give_what_transformers_gives(tmp_path, cls):
    directory = written(tmp_path, **SETTINGS)
    inputs, backend = inputs_of(cls, directory)
    images = [picture(30, 50), picture(9, 20, 1), Image.fromarray(picture(70, 33, 2))]
    text = "w1 <|vision_start|><|image_pad|><|vision_end|> w2 w3 <|image_pad|><|image_pad|> w4"
    ours = inputs(backend.encode(text).ids, {"image": images})
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    theirs = WithoutVideo(transformers.Qwen2VLImageProcessorPil.from_pretrained(directory), fast, None)(
        text=[text], images=images, return_tensors="pt"
    )
    assert ours.token_ids == theirs["input_ids"][0].tolist()
    kwargs = inputs.embed_kwargs(ours.features)
    assert torch.equal(kwargs["image_grid_thw"], theirs["image_grid_thw"])
    assert torch.equal(kwargs["pixel_values"], theirs["pixel_values"])
    types = torch.zeros(len(ours.token_ids), dtype=torch.int64)
    for feature in ours.features:
        types[feature.mm_position.offset : feature.mm_position.offset + feature.mm_position.length] = 1
    assert torch.equal(types, theirs["mm_token_type_ids"][0])


@pytest.mark.parametrize("tower", ["clip", "siglip"])
def test_llava_images_give_what_transformers_gives(tmp_path, tower):
    changes = {}
    if tower == "clip":
        directory = written(
            tmp_path,
            transformers.CLIPImageProcessorPil,
            size={"shortest_edge": 16},
            crop_size={"height": 16, "width": 16},
        )
        images = transformers.CLIPImageProcessorPil.from_pretrained(directory)
    else:
        directory = written(tmp_path, transformers.SiglipImageProcessorPil, size={"height": 16, "width": 16})
        images = transformers.SiglipImageProcessorPil.from_pretrained(directory)
        vision = LlavaForConditionalGeneration.tiny_config()["vision_config"] | {"model_type": "siglip_vision_model"}
        changes = {"vision_config": vision, "vision_feature_select_strategy": "full"}
    inputs, backend = inputs_of(LlavaForConditionalGeneration, directory, **changes)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    theirs = transformers.LlavaProcessor(
        images,
        fast,
        patch_size=4,
        vision_feature_select_strategy=changes.get("vision_feature_select_strategy", "default"),
        num_additional_image_tokens=int(tower == "clip"),
    )(text=["w1 <image> w2 <image>"], images=[picture(30, 50), picture(17, 16, 1)], return_tensors="pt")
    ours = inputs(backend.encode("w1 <image> w2 <image>").ids, {"image": [picture(30, 50), picture(17, 16, 1)]})
    assert ours.token_ids == theirs["input_ids"][0].tolist()
    assert torch.equal(inputs.embed_kwargs(ours.features)["pixel_values"], theirs["pixel_values"])


@pytest.mark.parametrize("cls", ALL)
def test_without_a_settings_file_the_class_s_own_are_taken(cls):
    inputs, _ = inputs_of(cls)
    modality_id = inputs.processor.placeholder("image")[0]
    made = inputs([1, modality_id, 2], {"image": picture(56, 84)})
    (feature,) = made.features
    assert made.token_ids == [1, *[modality_id] * feature.mm_position.length, 2]


def test_a_settings_file_that_contradicts_the_config_is_refused_by_key(tmp_path):
    directory = written(tmp_path, **SETTINGS | {"patch_size": 14})
    inputs = None
    with pytest.raises(CheckpointError, match=r"patch_size: is 14, config.json says 4"):
        inputs, _ = inputs_of(Qwen2VLForConditionalGeneration, directory)
    assert inputs is None


def video_patches_by_hand(frames, size, mean, std):
    """[frames, rows * size, columns * size, 3], already of its final size -> patches in the checkpoint's order."""
    pixels = (torch.tensor(frames).permute(0, 3, 1, 2).float() / 255 - mean[:, None, None]) / std[:, None, None]
    count, _, height, width = pixels.shape
    patches = []
    for first in range(0, count, 2):
        for block_row in range(height // size // 2):
            for block_column in range(width // size // 2):
                for row in (2 * block_row, 2 * block_row + 1):
                    for column in (2 * block_column, 2 * block_column + 1):
                        part = pixels[first : first + 2, :, row * size : (row + 1) * size]
                        part = part[..., column * size : (column + 1) * size]  # [frame, channel, size, size]
                        patches.append(part.transpose(0, 1).flatten())
    return torch.stack(patches)


@pytest.mark.parametrize("cls", QWEN)
@pytest.mark.parametrize("frames", [1, 4, 5])
def test_videos_become_patches_of_pairs_of_frames(monkeypatch, tmp_path, cls, frames):
    inputs, _ = inputs_of(cls, written(tmp_path, **SETTINGS))
    processor = inputs.processor
    monkeypatch.setattr(type(processor), "frame_size", lambda self, count, height, width: (16, 24))
    film = np.stack([picture(16, 24, seed) for seed in range(frames)])
    item = processor.process("video", Video(film, 2.0))
    even = np.concatenate([film, film[-1:]]) if frames % 2 else film
    images = processor.images
    expected = video_patches_by_hand(even, 4, torch.tensor(images.image_mean), torch.tensor(images.image_std))
    torch.testing.assert_close(item.data["pixel_values_videos"], expected)
    assert item.data["video_grid_thw"].tolist() == [len(even) // 2, 4, 6]
    embeds = len(item.token_ids) if item.is_embed is None else int(item.is_embed.sum())
    assert embeds == len(even) // 2 * 6
    if cls is Qwen2_5_VLForConditionalGeneration:
        assert float(item.data["second_per_grid_ts"]) == 1.0


def test_qwen3_writes_the_time_of_each_pair_of_frames_before_it(tmp_path):
    inputs, backend = inputs_of(Qwen3VLForConditionalGeneration, written(tmp_path, **SETTINGS))
    film = np.stack([picture(16, 24, seed) for seed in range(5)])
    item = inputs.processor.process("video", Video(film, 2.0))
    fast = transformers.Qwen3VLProcessor._calculate_timestamps
    times = fast(None, list(range(5)), 2.0, 2)
    assert times == [0.25, 1.25, 2.0]
    per_frame = int(item.is_embed.sum()) // 3
    expected = []
    for time in times:
        expected += [*backend.encode(f"<{time:.1f} seconds>").ids, START, *([VIDEO] * per_frame), END]
    assert item.token_ids == expected
    assert item.is_embed.tolist() == [token == VIDEO for token in expected]


def test_the_same_frames_at_another_speed_are_another_item(tmp_path):
    inputs, _ = inputs_of(Qwen2_5_VLForConditionalGeneration, written(tmp_path, **SETTINGS))
    film = np.stack([picture(16, 24, seed) for seed in range(4)])
    names = {inputs([VIDEO], {"video": (film, {"fps": fps})}).features[0].identifier for fps in (1.0, 2.0, 2.0)} | {
        inputs([VIDEO], {"video": film}).features[0].identifier
    }
    assert len(names) == 3


@pytest.mark.parametrize("cls", QWEN)
def test_an_image_that_is_far_too_narrow_is_refused_by_name(tmp_path, cls):
    inputs, _ = inputs_of(cls, written(tmp_path, **SETTINGS))
    with pytest.raises(RequestError, match=r"image 2 of 2: cannot be used: absolute aspect ratio"):
        inputs([IMAGE, IMAGE], {"image": [picture(20, 20), picture(1, 300)]})


def test_a_bare_video_pad_of_qwen3_is_refused(tmp_path):
    inputs, _ = inputs_of(Qwen3VLForConditionalGeneration, written(tmp_path, **SETTINGS))
    film = np.stack([picture(16, 24, seed) for seed in range(2)])
    assert inputs([1, START, VIDEO, END, 2], {"video": film}).features
    with pytest.raises(RequestError, match="token 1: is 259"):
        inputs([1, VIDEO, 2])
    with pytest.raises(RequestError, match="the prompt has 0 placeholders, and 1 item came"):
        inputs([1, VIDEO, 2], {"video": film})


def test_limits_hold_per_modality(tmp_path):
    config = MultiModalConfig(limit_per_prompt={"image": 1, "video": 0})
    inputs, _ = inputs_of(Qwen2VLForConditionalGeneration, written(tmp_path, **SETTINGS), config)
    assert inputs([IMAGE], {"image": picture(20, 20)}).features
    with pytest.raises(RequestError, match="image: 2 items in one prompt; limit_mm_per_prompt allows 1"):
        inputs([IMAGE, IMAGE], {"image": [picture(20, 20)] * 2})
    with pytest.raises(RequestError, match="video: 1 items in one prompt; limit_mm_per_prompt allows 0"):
        inputs([VIDEO], {"video": np.stack([picture(20, 20)] * 2)})


@pytest.mark.parametrize("cls", QWEN)
def test_the_size_of_frames_is_the_checkpoint_s(tmp_path, cls):
    def grid(directory):
        inputs, _ = inputs_of(cls, directory)
        return inputs.processor.process("video", Video(np.stack([picture(40, 60)] * 2))).data["video_grid_thw"].tolist()

    directory = written(tmp_path, **SETTINGS)
    _, rows, columns = grid(directory)
    assert rows * columns // 4 >= 128 // (2 if cls is Qwen3VLForConditionalGeneration else 1)
    small = {"size": {"shortest_edge": 64, "longest_edge": 640}}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(small))
    _, rows, columns = grid(directory)
    assert rows * columns * 16 <= 640
    (directory / "video_preprocessor_config.json").write_text("[")
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config\.json: is no JSON object"):
        grid(directory)


def test_settings_may_be_inside_processor_config(tmp_path):
    directory = written(tmp_path, **SETTINGS | {"image_mean": [0.1, 0.2, 0.3]})
    values = json.loads((directory / "preprocessor_config.json").read_text())
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": values}))
    inputs, _ = inputs_of(Qwen2VLForConditionalGeneration, directory)
    assert list(inputs.processor.images.image_mean) == [0.1, 0.2, 0.3]
