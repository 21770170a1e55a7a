"""The position table of a prompt with images and videos, for M-RoPE.

Text counts on in all rows. An item is a grid of frames, rows and columns of tokens: each token's three positions are
its place in the grid, from where the text has counted to. What comes after an item counts on from one more than its
greatest position, so that no position occurs on both sides. Source: Wang et al., Qwen2-VL, 2024, section 2.1; the time
step is Qwen2.5-VL's (Bai et al., 2025, section 2.1.3).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from torchplug.errors import ContractError, Problem


class GridSpan(NamedTuple):
    """The tokens of one item, or of one frame of it, in a prompt.

    Attributes:
        offset: Index of its first token in the expanded prompt.
        grid: (frames, rows, columns), counted in tokens of the prompt; frames by frames, row by row.
        time_step: What the time position grows by from frame to frame; the product is rounded down.
    """

    offset: int
    grid: tuple[int, int, int]
    time_step: float = 1.0

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns


def mrope_positions(num_tokens: int, spans: Iterable[GridSpan]) -> tuple[Tensor, int]:
    """Positions of a prompt, and what to add to the index of a token that is generated after it.

    Args:
        num_tokens: Length of the expanded prompt.
        spans: Its items, in any order; they do not overlap.

    Returns (positions, delta): positions int64 [3, num_tokens] on the CPU, rows time, height, width; delta is the
    greatest position + 1 - num_tokens, 0 where there are no items.

    Raises ContractError where a span overlaps another or ends after the prompt.
    """
    parts: list[Tensor] = []
    index = position = 0  # the next token, and the position that it gets if it is text
    for span in sorted(spans):
        if span.offset < index or span.offset + span.num_tokens > num_tokens:
            where = f"{span.num_tokens} tokens from {span.offset} on"
            says = f"overlap the item before them, which ends at {index}, or the prompt's end at {num_tokens}"
            raise ContractError("M-RoPE positions", Problem(where, says, "give each item's own offset and grid"))
        parts.append(_text(position, span.offset - index))
        position += span.offset - index
        if span.num_tokens:
            parts.append(position + _grid(span))
            position = int(parts[-1].max()) + 1
        index = span.offset + span.num_tokens
    parts.append(_text(position, num_tokens - index))
    position += num_tokens - index
    return torch.cat(parts, dim=1), position - num_tokens


def _text(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length).expand(3, length)


def _grid(span: GridSpan) -> Tensor:
    frames, rows, columns = span.grid
    # In float32 as wherever such models were trained: another precision rounds down elsewhere.
    times = (torch.arange(frames, dtype=torch.float32) * span.time_step).long()
    axes = torch.meshgrid(times, torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack(axes).reshape(3, -1)
