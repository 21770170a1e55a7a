"""What the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL share: patches of any number of images and videos in one
flat tensor, attention inside each frame, positions by row and column.

Patches lie in the order in which `spatial_merge_size` squared neighbours, which become one token of the prompt, stand
side by side. Source: Wang et al., Qwen2-VL, 2024, section 2.1; weight names as in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchplug.layers import (
    Linear,
    MRotaryEmbedding,
    PackedSequences,
    PatchEmbed,
    Rotation,
    apply_rotary,
    attend_packed,
    axial_rotary,
)

Grid = tuple[int, int, int]
"""Frames, rows and columns of one image (one frame) or video, counted in patches."""


class VisionPatchEmbed(nn.Module):
    """Flattened patches [patches, channels * frames * size * size] to [patches, hidden]."""

    def __init__(self, config: Any, embed_dim: int, *, bias: bool) -> None:
        super().__init__()
        size = config.patch_size
        self.proj = PatchEmbed((config.in_channels, config.temporal_patch_size, size, size), embed_dim, bias)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches.to(self.proj.weight.dtype))


class VisionAttention(nn.Module):
    """Attention of patches to all patches of the same sequence: a frame, or a window of one."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.head_size = embed_dim // num_heads
        self.qkv = Linear(embed_dim, 3 * embed_dim, bias=True)
        self.proj = Linear(embed_dim, embed_dim, bias=True)

    def forward(self, hidden_states: Tensor, rotation: Rotation, sequences: PackedSequences) -> Tensor:
        qk, value = self.qkv(hidden_states).split((2 * self.embed_dim, self.embed_dim), dim=-1)
        query, key = apply_rotary(qk, rotation, self.head_size).split(self.embed_dim, dim=-1)
        scale = self.head_size**-0.5
        return self.proj(attend_packed(query, key, value, sequences, self.head_size, scale))


class VisionBlock(nn.Module):
    def __init__(self, norm1: nn.Module, norm2: nn.Module, attn: VisionAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = norm1
        self.norm2 = norm2
        self.attn = attn
        self.mlp = mlp

    def forward(self, hidden_states: Tensor, rotation: Rotation, sequences: PackedSequences) -> Tensor:
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states), rotation, sequences)
        return hidden_states + self.mlp(self.norm2(hidden_states))


def vision_rotary(config: Any, head_size: int) -> MRotaryEmbedding:
    """The tower's rotary embedding by row and column."""
    parameters = config.get("rope_parameters")
    return axial_rotary(head_size, 10_000.0 if parameters is None else parameters.get("rope_theta", 10_000.0))


def grids_of(grid_thw: Tensor) -> list[Grid]:
    """int64 [items, 3] -> one grid per item."""
    return [(frames, rows, columns) for frames, rows, columns in grid_thw.tolist()]


def num_tokens_of(grid: Grid, merge_size: int) -> int:
    """Tokens of the prompt that an item becomes."""
    frames, rows, columns = grid
    return frames * (rows // merge_size) * (columns // merge_size)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of every frame of every item, in order: what attention is confined to."""
    return [rows * columns for frames, rows, columns in grids for _ in range(frames)]


def patch_positions(grids: Sequence[Grid], merge_size: int) -> Tensor:
    """Row and column of every patch, int64 [2, patches] on the CPU, in the patches' order."""
    return torch.cat([_frame_positions(grid, merge_size).repeat(1, grid[0]) for grid in grids], dim=1)


def _frame_positions(grid: Grid, merge_size: int) -> Tensor:
    _, rows, columns = grid
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    blocks = places.view(2, rows // merge_size, merge_size, columns // merge_size, merge_size)
    return blocks.transpose(2, 3).reshape(2, rows * columns)
