"""M-RoPE positions of one request: the table of its prompt, and the delta from there on.

The table is computed once, when the request comes; a step takes its columns. Cache slots never depend on it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class MRopeTable:
    """Positions by token index.

    Args:
        positions: int64 [rows, num_prompt_tokens] on the CPU, as `get_mrope_input_positions` returns it.
        delta: A token at index i past the prompt has position i + delta in every row.
    """

    __slots__ = ("_positions", "delta")

    def __init__(self, positions: Tensor, delta: int) -> None:
        self._positions: NDArray[np.int64] = positions.numpy()
        self.delta = delta

    @property
    def num_rows(self) -> int:
        """3, or more."""
        return len(self._positions)

    def fill(self, out: NDArray[np.int64], start: int, stop: int) -> None:
        """Write the positions of tokens [start, stop) into `out`, [num_rows, stop - start]."""
        prompt = self._positions.shape[1]
        known = max(0, min(stop, prompt) - start)
        if known:
            out[:, :known] = self._positions[:, start : start + known]
        if start + known < stop:
            out[:, known:] = np.arange(start + known, stop) + self.delta
