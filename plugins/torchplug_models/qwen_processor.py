"""Processors of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches of images and videos, and the tokens that they become.

Images go through transformers' own Qwen2VLImageProcessor. transformers' video processors need torchvision, so frames
are resized with Pillow here, to the size that those would choose, and then take the images' way. Frames are taken as
they are given: none is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torchplug.multimodal import Batching, MultiModalProcessor, ProcessedItem, Video, hf_image_processor, hf_settings

from torchplug_models.qwen_vision import num_tokens_of

DEFAULT_FPS = 24.0
"""Frames per second of a video that does not say, as in transformers."""


class Qwen2VLProcessor(MultiModalProcessor):
    """One `<|image_pad|>` or `<|video_pad|>` becomes as many as the item has tokens."""

    modalities: ClassVar[tuple[str, ...]] = ("image", "video")
    fields: ClassVar[Mapping[str, Batching]] = {
        "pixel_values": Batching.CONCATENATE,
        "image_grid_thw": Batching.STACK,
        "pixel_values_videos": Batching.CONCATENATE,
        "video_grid_thw": Batching.STACK,
    }
    video_tokens: ClassVar[tuple[int, int]] = (128, 768)
    """Least and most tokens of a frame, before frames are grouped (Qwen3-VL: of all frames together), where the
    checkpoint does not say; transformers has it in pixels of the published patch sizes."""

    @cached_property
    def images(self) -> Any:
        """transformers' image processor."""
        vision = self.context.hf_config.vision_config
        return hf_image_processor(
            "Qwen2VLImageProcessorPil",
            self.context,
            patch_size=vision.get("patch_size", 14),
            temporal_patch_size=vision.get("temporal_patch_size", 2),
            merge_size=vision.get("spatial_merge_size", 2),
        )

    @cached_property
    def video_pixels(self) -> tuple[int, int]:
        """Least and most pixels of a frame (Qwen3-VL: of all frames together)."""
        token = (self.images.patch_size * self.images.merge_size) ** 2
        found = hf_settings(self.context, "video_preprocessor_config.json", "video_processor") or {}
        size = found.get("size") or {}
        least = size.get("shortest_edge") or found.get("min_pixels") or self.video_tokens[0] * token
        most = size.get("longest_edge") or found.get("max_pixels") or self.video_tokens[1] * token
        return least, most

    def settings(self) -> Mapping[str, Any]:
        return {"images": self.images.to_dict(), "video_pixels": self.video_pixels}

    def placeholder(self, modality: str) -> Sequence[int]:
        return [self.pad(modality)]

    def pad(self, modality: str) -> int:
        """The token that receives an embedding."""
        config = self.context.hf_config
        token: int = config.image_token_id if modality == "image" else config.video_token_id
        return token

    def process(self, modality: str, item: Any) -> ProcessedItem:
        if modality == "image":
            made = self.images(images=[item], return_tensors="pt", input_data_format="channels_last")
            grid = made["image_grid_thw"][0]
            return ProcessedItem(
                [self.pad("image")] * self.num_tokens(grid),
                {"pixel_values": made["pixel_values"], "image_grid_thw": grid},
            )
        patches, grid = self.video_patches(item)
        return self.video_item(item, patches, grid)

    def num_tokens(self, grid: Tensor) -> int:
        frames, rows, columns = grid.tolist()
        return num_tokens_of((frames, rows, columns), self.images.merge_size)

    def video_patches(self, video: Video) -> tuple[Tensor, Tensor]:
        """(patches [n, patch], grid int64 [3]); the last frame is repeated until all are in whole groups."""
        from PIL import Image

        images = self.images
        count, height, width = video.frames.shape[:3]
        height, width = self.frame_size(count, height, width)
        frames = [np.asarray(Image.fromarray(frame).resize((width, height), images.resample)) for frame in video.frames]
        group = images.temporal_patch_size
        frames += frames[-1:] * (-count % group)
        made = images(
            images=frames,
            do_resize=False,
            temporal_patch_size=1,
            return_tensors="pt",
            input_data_format="channels_last",
        )
        _, rows, columns = made["image_grid_thw"][0].tolist()
        # [groups, group, patches, channels, size * size] -> a patch holds its frames inside each channel
        area = images.patch_size**2
        patches = made["pixel_values"].view(-1, group, rows * columns, made["pixel_values"].shape[1] // area, area)
        patches = patches.permute(0, 2, 3, 1, 4).reshape(-1, made["pixel_values"].shape[1] * group)
        return patches, torch.tensor([len(frames) // group, rows, columns])

    def frame_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that the frames of a video are brought to."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        factor = self.images.patch_size * self.images.merge_size
        size: tuple[int, int] = smart_resize(height, width, factor, *self.video_pixels)
        return size

    def video_item(self, video: Video, patches: Tensor, grid: Tensor) -> ProcessedItem:
        tokens = [self.pad("video")] * self.num_tokens(grid)
        return ProcessedItem(tokens, {"pixel_values_videos": patches, "video_grid_thw": grid})

    def example(self, modality: str, index: int) -> Any:
        """The first video is longer in time than a frame of the fewest tokens is wide."""
        if modality != "video" or index % 4:
            return super().example(modality, index)
        frames = np.random.default_rng(index).integers(0, 256, (28, 56, 56, 3), dtype=np.uint8)
        return Video(frames, fps=2.0)


class Qwen2_5_VLProcessor(Qwen2VLProcessor):
    """A video also says how many seconds a frame of its grid lasts."""

    fields: ClassVar[Mapping[str, Batching]] = Qwen2VLProcessor.fields | {"second_per_grid_ts": Batching.STACK}

    def video_item(self, video: Video, patches: Tensor, grid: Tensor) -> ProcessedItem:
        item = super().video_item(video, patches, grid)
        seconds = torch.tensor(self.images.temporal_patch_size / (video.fps or DEFAULT_FPS))
        return ProcessedItem(item.token_ids, {**item.data, "second_per_grid_ts": seconds})


class Qwen3VLProcessor(Qwen2VLProcessor):
    """A video is its frames, each after its time as text: `<0.5 seconds><|vision_start|>...<|vision_end|>`."""

    def placeholder(self, modality: str) -> Sequence[int]:
        config = self.context.hf_config
        if modality == "image":
            return [self.pad(modality)]
        return [config.vision_start_token_id, self.pad(modality), config.vision_end_token_id]

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        return frozenset((self.pad("image"), self.pad("video")))

    def frame_size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

        group = self.images.temporal_patch_size
        factor = self.images.patch_size * self.images.merge_size
        size: tuple[int, int] = smart_resize(max(frames, group), height, width, group, factor, *self.video_pixels)
        return size

    def video_item(self, video: Video, patches: Tensor, grid: Tensor) -> ProcessedItem:
        config, group, fps = self.context.hf_config, self.images.temporal_patch_size, video.fps or DEFAULT_FPS
        frames, rows, columns = grid.tolist()
        per_frame = num_tokens_of((1, rows, columns), self.images.merge_size)
        last = len(video.frames) - 1
        tokens: list[int] = []
        for frame in range(frames):
            first, final = min(frame * group, last), min((frame + 1) * group - 1, last)
            tokens += self.context.token_ids(f"<{(first + final) / fps / 2:.1f} seconds>")
            tokens += [config.vision_start_token_id, *[self.pad("video")] * per_frame, config.vision_end_token_id]
        is_embed = torch.tensor(tokens) == self.pad("video")
        return ProcessedItem(tokens, {"pixel_values_videos": patches, "video_grid_thw": grid}, is_embed)
