"""From the items that a step reads to embeddings: encode what is missing, one call per modality for all requests, and
lay the rows out over the step's flat batch.

Counts are compared here, item by item, before anything is merged: plain indexing would spread one row over all places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchplug.engine.encoder_cache import EncoderCache
from torchplug.engine.prompt_items import PromptItems
from torchplug.errors import ContractError, Problem
from torchplug.interfaces import MultiModalFeatureSpec
from torchplug.multimodal import MultiModalInputProcessor
from torchplug.results import describe


class ItemEmbedder:
    """Encodes items into the cache, and reads them from it.

    Args:
        embed: The hook `embed_multimodal`.
        inputs: Makes its keywords.
        cache: Where embeddings are kept; the scheduler has reserved room for what a step reads.
        subject: How errors name the model.
    """

    def __init__(
        self,
        embed: Callable[..., Any],
        inputs: MultiModalInputProcessor,
        cache: EncoderCache,
        subject: str,
    ) -> None:
        self._embed = embed
        self._inputs = inputs
        self._cache = cache
        self._subject = subject

    def encode(self, features: Iterable[MultiModalFeatureSpec]) -> dict[str, Exception]:
        """Encode the items that are held and not there yet. Call it under `torch.inference_mode()`.

        Returns what went wrong, by the item's identifier: the others are encoded all the same. Where a call for several
        fails, each is tried alone, so that an item is blamed for itself only.
        """
        by_modality: dict[str, dict[str, MultiModalFeatureSpec]] = {}
        for feature in features:
            if not self._cache.is_encoded(feature.identifier):
                by_modality.setdefault(feature.modality, {}).setdefault(feature.identifier, feature)
        errors: dict[str, Exception] = {}
        for items in by_modality.values():
            self._encode_together(list(items.values()), errors)
        return errors

    def _encode_together(self, items: Sequence[MultiModalFeatureSpec], errors: dict[str, Exception]) -> None:
        try:
            found = self._embed(**self._inputs.embed_kwargs(items))
            if len(found) != len(items):
                says = f"returned {len(found)} embeddings for {len(items)} {items[0].modality} items"
                raise ContractError(self._subject, Problem("embed_multimodal", says, _FIX))
        except Exception as error:
            if len(items) == 1:
                errors[items[0].identifier] = error
                return
            for item in items:
                self._encode_together([item], errors)
            return
        for item, rows in zip(items, found, strict=True):
            places = item.mm_position.num_embeds
            if rows.shape[0] == places:
                self._cache.put(item.identifier, rows)
            else:
                says = f"returned {describe(rows)} for a {item.modality} with {places} places in the prompt"
                errors[item.identifier] = ContractError(self._subject, Problem("embed_multimodal", says, _FIX))

    def rows(self, parts: Sequence[tuple[PromptItems | None, int, int]]) -> tuple[list[Tensor], Tensor] | None:
        """Embeddings of a step, and where they go.

        Args:
            parts: Of each request in the batch its items (None: text alone) and the step's tokens [start, stop) of it.

        Returns (rows, is_multimodal) for `embed_input_ids`: [n_i, hidden] tensors in the order of the places, and bool
        [num_tokens] on the CPU; None where the step reads no item.
        """
        rows: list[Tensor] = []
        places: list[Any] = []
        flat = 0
        for items, start, stop in parts:
            if items is not None:
                found = items.rows_in(start, stop)
                own = [
                    self._cache.get(part.feature.identifier)[part.first_row : part.first_row + len(part.places)]
                    for part in found
                ]
                own_places = [part.places for part in found]
                if _interleaved(own_places):
                    order = np.concatenate(own_places).argsort()
                    own = [torch.cat(own)[torch.from_numpy(order).to(own[0].device)]]
                    own_places = [np.concatenate(own_places)[order]]
                rows += own
                places += [place + flat for place in own_places]
            flat += stop - start
        if not rows:
            return None
        mask = np.zeros(flat, dtype=bool)
        mask[np.concatenate(places)] = True
        return rows, torch.from_numpy(mask)


_FIX = "return one [tokens, hidden] tensor per item, a row for each of its places in the prompt"


def _interleaved(places: Sequence[Any]) -> bool:
    """Whether an item has a place before the last one of the item before it."""
    return any(after[0] < before[-1] for before, after in pairwise(places))
