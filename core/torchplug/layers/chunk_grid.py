"""The chunks that a scan works in: several requests' tokens as a rectangle, whatever their lengths."""

from __future__ import annotations

import torch
from torch import Tensor


class ChunkGrid:
    """Chunks of several requests, each request's from its own first token on, the last one filled up.

    Args:
        lengths: Tokens of each request, 1 or more.
        chunk_size: Most tokens of a chunk.

    Attributes:
        size: Tokens of a chunk.
        chunks: How many in all.
        chunks_of: How many of each request.
    """

    def __init__(self, lengths: tuple[int, ...], chunk_size: int) -> None:
        # As small as the longest request allows: of 65 tokens, two chunks of 33 are filled up by 1, of 64 by 63.
        longest = max(lengths)
        self.size = -(-longest // -(-longest // chunk_size))
        self.chunks_of = tuple(-(-length // self.size) for length in lengths)
        self.chunks = sum(self.chunks_of)
        self._lengths = lengths
        self._whole = self.chunks * self.size == sum(lengths)

    def spread(self, x: Tensor) -> Tensor:
        """[T, ...] -> [chunks, size, ...], zero where no token is."""
        if self._whole:
            return x.reshape(self.chunks, self.size, *x.shape[1:])
        out = x.new_zeros((self.chunks * self.size, *x.shape[1:]))
        for start, rows in zip(self._starts(), torch.split(x, list(self._lengths)), strict=True):
            out[start : start + len(rows)] = rows
        return out.view(self.chunks, self.size, *x.shape[1:])

    def gather(self, x: Tensor) -> Tensor:
        """[chunks, size, ...] -> [T, ...], of the tokens that are."""
        flat = x.flatten(0, 1)
        if self._whole:
            return flat
        pieces = [flat[start : start + length] for start, length in zip(self._starts(), self._lengths, strict=True)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _starts(self) -> list[int]:
        starts, chunk = [], 0
        for chunks in self.chunks_of:
            starts.append(chunk * self.size)
            chunk += chunks
        return starts
