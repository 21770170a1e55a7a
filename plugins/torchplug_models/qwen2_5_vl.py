"""Qwen2.5-VL: Qwen2-VL whose tower attends inside windows in most of its layers, and whose video time is in seconds.

Source: Bai et al., Qwen2.5-VL Technical Report, 2025, section 2.1; config and weight names as in transformers'
Qwen2_5_VLForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchplug.interfaces import MultiModalFeatureSpec
from torchplug.layers import Linear, MergedColumnParallelLinear, RMSNorm, get_act_and_mul, pack_sequences
from torchplug.multimodal import MULTIMODAL_REGISTRY

from torchplug_models.qwen2_vl import PatchMerger, Qwen2VLForConditionalGeneration
from torchplug_models.qwen_processor import Qwen2_5_VLProcessor
from torchplug_models.qwen_vision import (
    Grid,
    VisionAttention,
    VisionBlock,
    VisionPatchEmbed,
    frame_lengths,
    patch_positions,
    vision_rotary,
)


class VisionGatedMLP(nn.Module):
    def __init__(self, width: int, intermediate_size: int, act: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(width, [intermediate_size] * 2, bias=True)
        self.act_fn = get_act_and_mul(act)
        self.down_proj = Linear(intermediate_size, width, bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden_states)))


class Qwen2_5_VisionTransformer(nn.Module):
    """The tower. Its patches are brought into the order of the windows once, and its tokens back out of it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.merge_size = config.spatial_merge_size
        self.window = config.window_size // config.patch_size // config.spatial_merge_size
        self.full_attention = frozenset(config.fullatt_block_indexes)
        self.patch_embed = VisionPatchEmbed(config, width, bias=False)
        self.rotary_pos_emb = vision_rotary(config, width // heads)
        self.blocks = nn.ModuleList(
            VisionBlock(
                RMSNorm(width, 1e-6),
                RMSNorm(width, 1e-6),
                VisionAttention(width, heads),
                VisionGatedMLP(width, config.intermediate_size, config.hidden_act),
            )
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(RMSNorm(width, 1e-6), width, self.merge_size, config.out_hidden_size)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[patches, patch] of all items, one after another -> [tokens, hidden of the language model]."""
        hidden_states = self.patch_embed(patches)
        device, unit = hidden_states.device, self.merge_size**2
        windows = list(window_tokens(grids, self.merge_size, self.window))
        order = torch.cat(windows)  # of tokens; a token's patches stay together
        patch_order = (order[:, None] * unit + torch.arange(unit)).flatten()
        positions = patch_positions(grids, self.merge_size)[:, patch_order]
        rotation = self.rotary_pos_emb(positions.to(device), hidden_states.dtype)
        frames = pack_sequences(frame_lengths(grids), device)
        in_windows = pack_sequences([len(window) * unit for window in windows], device)
        hidden_states = hidden_states[patch_order.to(device)]
        for index, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, rotation, frames if index in self.full_attention else in_windows)
        return self.merger(hidden_states)[order.argsort().to(device)]


def window_tokens(grids: Sequence[Grid], merge_size: int, window: int) -> Iterator[Tensor]:
    """The tokens of every window of every frame, int64, counted over all items; windows at the right and lower edge
    are smaller.

    Args:
        grids: Of the items, in patches.
        merge_size: Patches per token, along an axis.
        window: Tokens per window, along an axis.
    """
    first = 0
    for frames, patch_rows, patch_columns in grids:
        rows, columns = patch_rows // merge_size, patch_columns // merge_size
        tokens = first + torch.arange(frames * rows * columns).view(frames, rows, columns)
        first += frames * rows * columns
        for frame in tokens:
            for row in range(0, rows, window):
                for column in range(0, columns, window):
                    yield frame[row : row + window, column : column + window].flatten()


@MULTIMODAL_REGISTRY.register_processor(Qwen2_5_VLProcessor)
class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Qwen2.5-VL with its language-model head."""

    tower: ClassVar[type[nn.Module]] = Qwen2_5_VisionTransformer
    config_defaults: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 4,
            "window_size": 112,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }

    def time_step(self, feature: MultiModalFeatureSpec) -> float:
        """Positions per second times the seconds of a frame of the grid; an image stands still."""
        assert feature.data is not None
        seconds = feature.data.get("second_per_grid_ts") if feature.modality == "video" else None
        return 1.0 if seconds is None else self.config.vision_config.tokens_per_second * float(seconds)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config whose tower has a layer with windows and one without."""
        config = super().tiny_config()
        config["text_config"] |= {"model_type": "qwen2_5_vl_text"}
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": config["text_config"]["hidden_size"],
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 4,
            "window_size": 16,
            "tokens_per_second": 2,
            "fullatt_block_indexes": [1],
        }
        named = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        return config | named | {"vision_config": vision}
