"""Attention inside an encoder: every token of a sequence sees every other, many sequences of different length at once.

The sequences (images, frames of a video, windows of an image) lie one after another in one flat tensor. Those of equal
length are attended as one batch, so nothing is padded and nothing is masked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """How a flat tensor of [num_tokens, ...] falls into sequences. Made by `pack_sequences`, once per forward pass.

    Attributes:
        num_tokens: Tokens of all of them.
        groups: (length, rows) for each length that occurs: the flat rows int64 [count * length] of its sequences, or
            None where it is the only length, so that the flat tensor is its sequences in order.
    """

    num_tokens: int
    groups: tuple[tuple[int, Tensor | None], ...]


def pack_sequences(lengths: Iterable[int], device: torch.device | str) -> PackedSequences:
    """The plan of a flat tensor that holds sequences of these lengths, in order; a length of 0 is no sequence."""
    sizes = [length for length in lengths if length]
    starts = [0, *accumulate(sizes)]
    by_length: dict[int, list[int]] = defaultdict(list)
    for start, length in zip(starts, sizes, strict=False):
        by_length[length].append(start)
    if len(by_length) < 2:
        return PackedSequences(starts[-1], tuple((length, None) for length in by_length))
    groups = []
    for length, begins in by_length.items():
        rows = torch.tensor(begins)[:, None] + torch.arange(length)
        groups.append((length, rows.flatten().to(device)))
    return PackedSequences(starts[-1], tuple(groups))


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, head_size: int, scale: float
) -> Tensor:
    """Non-causal attention of every token to its own sequence.

    Args:
        query, key, value: [num_tokens, heads * head_size] of one dtype and device, already rotated.
        sequences: Where each sequence is; its rows are on that device.
        head_size: Size of one head.
        scale: Factor on the scores, usually head_size ** -0.5.

    Returns [num_tokens, heads * head_size].
    """
    if query.shape[0] != sequences.num_tokens:
        raise ValueError(f"{query.shape[0]} tokens, and the sequences have {sequences.num_tokens}")
    result = torch.empty_like(query)
    for length, rows in sequences.groups:
        q, k, v = (_heads(x if rows is None else x[rows], length, head_size) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).reshape(-1, query.shape[1])
        if rows is None:
            return attended
        result[rows] = attended
    return result


def _heads(x: Tensor, length: int, head_size: int) -> Tensor:
    """[count * length, heads * head_size] -> [count, heads, length, head_size]."""
    return x.reshape(-1, length, x.shape[1] // head_size, head_size).transpose(1, 2)
