"""Tangram's processor: an image becomes tiles, and the tokens `<open>`, a row of tiles, `<row>`, ..., `<close>`.

It needs nothing but NumPy: an image is not resized, but cut to whole tiles from its upper left corner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torchplug.multimodal import Batching, MultiModalProcessor, ProcessedItem


class TangramProcessor(MultiModalProcessor):
    """One `tile_token_id` in a prompt stands for an image."""

    fields: ClassVar[Mapping[str, Batching]] = {"tiles": Batching.CONCATENATE, "grid": Batching.STACK}

    def placeholder(self, modality: str) -> Sequence[int]:
        return [self.context.hf_config.tile_token_id]

    def process(self, modality: str, item: Any) -> ProcessedItem:
        """item: uint8 [height, width, 3]."""
        config = self.context.hf_config
        size = config.tile_size
        rows, columns = item.shape[0] // size, item.shape[1] // size
        if not 0 < rows * columns <= config.max_tiles:
            raise ValueError(f"it has {rows} x {columns} tiles of {size} pixels, and takes 1 to {config.max_tiles}")
        whole = item[: rows * size, : columns * size].reshape(rows, size, columns, size, 3)
        tiles = np.ascontiguousarray(whole.transpose(0, 2, 4, 1, 3)).reshape(rows * columns, -1)
        row = [*[config.tile_token_id] * columns, config.row_token_id]
        token_ids = [config.open_token_id, *row * rows, config.close_token_id]
        return ProcessedItem(
            token_ids,
            {"tiles": torch.from_numpy(tiles).float() / 127.5 - 1, "grid": torch.tensor([rows, columns])},
            torch.tensor(token_ids) == config.tile_token_id,
        )

    def example(self, modality: str, index: int) -> Any:
        """Whole tiles, of another shape each time."""
        rows, columns = ((2, 3), (3, 1), (1, 4))[index % 3]
        size = self.context.hf_config.tile_size
        return np.random.default_rng(index).integers(0, 256, (rows * size, columns * size, 3), dtype=np.uint8)
