"""Rotary embedding by several positions per token: M-RoPE of language models, and the two axes of an image.

Each pair of dimensions of a head turns by one row of the positions. Which row is a pair's own is fixed when the layer
is built. Sources: Wang et al., Qwen2-VL, 2024, section 2.1 (M-RoPE; the 2-D rotary embedding of its tower); Qwen3-VL
Technical Report, 2025, section 2 (interleaved rows).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchplug.layers.rotary import RotaryEmbedding, Rotation, inverse_frequencies


class MRotaryEmbedding(RotaryEmbedding):
    """The rotation for positions of several rows.

    Args:
        inv_freq: float32 [rotary_dim / 2], angle per position of each pair of dimensions.
        row_of_pair: Per pair, the row of the positions that it turns by; see `mrope_rows`.
        attention_scaling: Factor on cos and sin.
        interleaved: Style of the pairs, as in RotaryEmbedding.

    `forward` takes positions int64 [rows, num_tokens]. Where all rows are equal the result is that of a plain
    RotaryEmbedding, and bit for bit that of the one row, [num_tokens], which is taken too.
    """

    row_of_pair: Tensor

    def __init__(
        self,
        inv_freq: Tensor,
        row_of_pair: Sequence[int],
        *,
        attention_scaling: float = 1.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__(inv_freq, attention_scaling=attention_scaling, interleaved=interleaved)
        if len(row_of_pair) != len(inv_freq):
            raise ValueError(f"{len(row_of_pair)} rows for {len(inv_freq)} pairs of dimensions")
        self.register_buffer("row_of_pair", torch.tensor(row_of_pair, dtype=torch.int64), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [rows, num_tokens], or [num_tokens]; dtype: that of the heads to turn."""
        own = positions[:, None] if positions.dim() == 1 else positions[self.row_of_pair].T
        return self._rotation(own.float() * self.inv_freq, dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, row_of_pair={self.row_of_pair.tolist()}"


def mrope_rows(section: Sequence[int], *, interleaved: bool) -> list[int]:
    """Which row (0 time, 1 height, 2 width, ...) each pair of dimensions turns by.

    Args:
        section: `mrope_section` of a config: pairs per row; their sum is rotary_dim / 2.
        interleaved: False (Qwen2-VL, Qwen2.5-VL): the first section[0] pairs by row 0, the next by row 1, ... True
            (Qwen3-VL): height and width take every third pair from 1 and from 2 on, up to 3 * their section; what is
            left is time's.
    """
    if not interleaved:
        return [row for row, pairs in enumerate(section) for _ in range(pairs)]
    rows = [0] * sum(section)
    for row in range(1, len(section)):
        taken = range(row, min(len(section) * section[row], len(rows)), len(section))
        for pair in taken:
            rows[pair] = row
    return rows


def axial_rotary(head_size: int, theta: float = 10_000.0) -> MRotaryEmbedding:
    """The 2-D rotary embedding of a vision tower: half the pairs turn by a patch's row, half by its column, both at the
    same frequencies. Positions are int64 [2, num_patches].

    Raises ValueError where the head cannot be split so: its size is no multiple of 4.
    """
    if head_size % 4:
        raise ValueError(f"a head of {head_size} dimensions has no two equal halves of pairs; a multiple of 4 has")
    frequencies = inverse_frequencies(theta, head_size // 2)
    pairs = len(frequencies)
    return MRotaryEmbedding(torch.cat((frequencies, frequencies)), [0] * pairs + [1] * pairs)
