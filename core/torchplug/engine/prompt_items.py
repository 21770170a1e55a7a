"""The items of one request, asked by token index: which a step reads, and which rows of their embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchplug.interfaces import MultiModalFeatureSpec


@dataclass(frozen=True, slots=True)
class ItemRows:
    """What one item gives to a step over tokens of its request.

    Attributes:
        feature: The item.
        places: int64, ascending: the tokens that receive its rows, counted from the step's first token.
        first_row: Its row for the first of them; the others follow.
    """

    feature: MultiModalFeatureSpec
    places: NDArray[np.int64]
    first_row: int


class PromptItems:
    """Items in prompt order. Their ranges may overlap (sound inside a film); the tokens that they embed do not.

    Args:
        features: Of one request, in any order.
    """

    __slots__ = ("_embedded", "features")

    def __init__(self, features: Sequence[MultiModalFeatureSpec]) -> None:
        self.features = tuple(sorted(features, key=lambda feature: feature.mm_position.offset))
        # Of each item, the prompt's tokens that receive its rows: computed once, since a prompt is read in chunks.
        self._embedded = [_embedded_tokens(feature) for feature in self.features]

    def read_in(self, start: int, stop: int) -> Iterator[MultiModalFeatureSpec]:
        """Items with a row at a token of [start, stop)."""
        for feature, tokens in zip(self.features, self._embedded, strict=True):
            if np.searchsorted(tokens, start) < np.searchsorted(tokens, stop):
                yield feature

    def rows_in(self, start: int, stop: int) -> list[ItemRows]:
        """What each item gives to tokens [start, stop), from whichever row the chunk begins at."""
        found = []
        for feature, tokens in zip(self.features, self._embedded, strict=True):
            first, end = np.searchsorted(tokens, (start, stop))
            if first < end:
                found.append(ItemRows(feature, tokens[first:end] - start, int(first)))
        return found

    def done_before(self, stop: int) -> Iterator[MultiModalFeatureSpec]:
        """Items that no token from `stop` on reads."""
        for feature, tokens in zip(self.features, self._embedded, strict=True):
            if not len(tokens) or tokens[-1] < stop:
                yield feature

    def content_in(self, start: int, stop: int) -> tuple[tuple[str, int], ...]:
        """What tells a cache block of tokens [start, stop) from one with the same ids and other items: of each item
        that reaches into it, its content and where the block begins in it."""
        return tuple(
            (feature.identifier, start - feature.mm_position.offset)
            for feature in self.features
            if feature.mm_position.offset < stop and feature.mm_position.offset + feature.mm_position.length > start
        )


def _embedded_tokens(feature: MultiModalFeatureSpec) -> NDArray[np.int64]:
    place = feature.mm_position
    if place.is_embed is None:
        return np.arange(place.offset, place.offset + place.length)
    return np.flatnonzero(place.is_embed.numpy()) + place.offset
