"""A prompt with items made ready for the engine: items decoded and processed, placeholders expanded, contents hashed.

All of it happens on the host, before a request is queued, so that whatever is wrong with a request's items is that
request's error alone.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from torchplug.config import MultiModalConfig
from torchplug.errors import ContractError, Problem, RequestError
from torchplug.interfaces import MultiModalFeatureSpec, PlaceholderRange
from torchplug.multimodal.media import Media, Video
from torchplug.multimodal.processor import MultiModalProcessor, ProcessedItem

_KEPT_BYTES: Final = 256 << 20
"""Processed items that are kept for the next request with the same one."""


@dataclass(frozen=True, slots=True)
class MultiModalInputs:
    """An expanded prompt.

    Attributes:
        token_ids: With every placeholder replaced by its item's tokens.
        features: The items in prompt order.
    """

    token_ids: list[int]
    features: tuple[MultiModalFeatureSpec, ...] = ()


class MultiModalInputProcessor:
    """Makes the prompts of one model ready.

    Args:
        processor: The model's own.
        config: Limits per modality; None: no limits.
        placeholder_texts: Per modality, what an author writes for an item, for messages.
    """

    def __init__(
        self,
        processor: MultiModalProcessor,
        config: MultiModalConfig | None = None,
        placeholder_texts: Mapping[str, str] | None = None,
    ) -> None:
        self.processor = processor
        self._config = config or MultiModalConfig()
        self._texts = dict(placeholder_texts or {})
        self._placeholders = {modality: tuple(processor.placeholder(modality)) for modality in processor.modalities}
        self._reserved = processor.reserved_token_ids
        self._fingerprint = _fingerprint(processor)
        self._kept: OrderedDict[str, ProcessedItem] = OrderedDict()
        self._kept_bytes = 0
        if len(set(self._placeholders.values())) < len(self._placeholders) or not all(self._placeholders.values()):
            says = f"has the placeholders {self._placeholders}: each must be there, and be one modality's alone"
            where = f"{type(processor).__name__}.placeholder"
            raise ContractError("multimodal processor", Problem(where, says, "give each modality token ids of its own"))

    def __call__(self, token_ids: Sequence[int], data: Mapping[str, Any] | None = None) -> MultiModalInputs:
        """Expand one prompt.

        Args:
            token_ids: As its author wrote it: one placeholder for each item.
            data: Per modality, an item or a list of items, in prompt order.

        Raises:
            RequestError: With every problem: an item that cannot be used, more items than allowed, placeholders and
                items that differ in number, a placeholder's token where no item is.
        """
        problems: list[Problem] = []
        items: dict[str, list[tuple[str, ProcessedItem]]] = {}
        for modality, given in (data or {}).items():
            sources = _sources(modality, given)
            refused = self._refused(modality, sources)
            problems += refused
            if not refused and sources:
                items[modality] = list(self._processed(modality, sources, problems))
        if problems:
            raise RequestError("multi_modal_data", problems)
        if not items and self._reserved.isdisjoint(token_ids):
            return MultiModalInputs(list(token_ids))
        return self._expanded(token_ids, items)

    def embed_kwargs(self, features: Sequence[MultiModalFeatureSpec]) -> dict[str, Any]:
        """Keywords of `embed_multimodal` for items of one modality, of any requests, in order."""
        return self.processor.batch([feature.data for feature in features if feature.data is not None])

    def _refused(self, modality: str, sources: Sequence[Any]) -> list[Problem]:
        if modality not in self._placeholders:
            fix = f"pass {' or '.join(self._placeholders)}"
            return [Problem(modality, "is a modality that this model does not take", fix)]
        limit = self._config.get_limit_per_prompt(modality)
        if len(sources) <= limit:
            return []
        fix = f"pass at most {limit}, or load with limit_mm_per_prompt={{{modality!r}: {len(sources)}}}"
        return [Problem(modality, f"{len(sources)} items in one prompt; limit_mm_per_prompt allows {limit}", fix)]

    def _processed(
        self, modality: str, sources: Sequence[Any], problems: list[Problem]
    ) -> Iterator[tuple[str, ProcessedItem]]:
        """(content hash, result) of each item that can be used; what is wrong with the others goes to `problems`."""
        for index, source in enumerate(sources):
            where = f"{modality} {index + 1} of {len(sources)}"
            try:
                media = self.processor.load(modality, source, where)
            except RequestError as error:
                problems += error.problems
                continue
            name = content_hash(modality, media, self._fingerprint)
            try:
                item = self._kept_item(name) or self._new_item(name, modality, media)
            except ValueError as error:
                problems.append(Problem(where, f"cannot be used: {error}", "pass another one"))
                continue
            yield name, item

    def _kept_item(self, name: str) -> ProcessedItem | None:
        if name in self._kept:
            self._kept.move_to_end(name)
        return self._kept.get(name)

    def _new_item(self, name: str, modality: str, media: Media) -> ProcessedItem:
        item = self.processor.process(modality, media)
        if not item.token_ids or (item.is_embed is not None and len(item.is_embed) != len(item.token_ids)):
            says = f"gave {len(item.token_ids)} token ids and an is_embed of {item.is_embed}"
            where = f"{type(self.processor).__name__}.process"
            raise ContractError("multimodal processor", Problem(where, says, "is_embed has an entry for each token id"))
        self._kept[name] = item
        self._kept_bytes += item.num_bytes
        while self._kept_bytes > _KEPT_BYTES and self._kept:
            self._kept_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return item

    def _expanded(
        self, token_ids: Sequence[int], items: Mapping[str, Sequence[tuple[str, ProcessedItem]]]
    ) -> MultiModalInputs:
        places = self._places(token_ids)
        found = {modality: sum(m == modality for _, m in places) for modality in self._placeholders}
        problems = [
            self._miscounted(modality, len(items.get(modality, ())), count)
            for modality, count in found.items()
            if count != len(items.get(modality, ()))
        ]
        problems += self._strays(token_ids, places)
        if problems:
            raise RequestError("prompt", problems)
        ids: list[int] = []
        features: list[MultiModalFeatureSpec] = []
        next_item = {modality: iter(of_it) for modality, of_it in items.items()}
        copied = 0
        for start, modality in places:
            ids += token_ids[copied:start]
            name, item = next(next_item[modality])
            place = PlaceholderRange(len(ids), len(item.token_ids), item.is_embed)
            features.append(MultiModalFeatureSpec(modality, place, item.data, name))
            ids += item.token_ids
            copied = start + len(self._placeholders[modality])
        ids += token_ids[copied:]
        return MultiModalInputs(ids, tuple(features))

    def _places(self, token_ids: Sequence[int]) -> list[tuple[int, str]]:
        """(index, modality) of every placeholder in the prompt; where one begins with another, the longer one."""
        by_first: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        for modality, ids in sorted(self._placeholders.items(), key=lambda pair: -len(pair[1])):
            by_first.setdefault(ids[0], []).append((modality, ids))
        places: list[tuple[int, str]] = []
        index = 0
        while index < len(token_ids):
            for modality, ids in by_first.get(token_ids[index], ()):
                if tuple(token_ids[index : index + len(ids)]) == ids:
                    places.append((index, modality))
                    index += len(ids)
                    break
            else:
                index += 1
        return places

    def _miscounted(self, modality: str, given: int, found: int) -> Problem:
        says = f"the prompt has {found} placeholder{'s' * (found != 1)}, and {given} item{'s' * (given != 1)} came"
        text = self._texts.get(modality)
        written = repr(text) if text else f"token ids {list(self._placeholders[modality])}"
        return Problem(modality, says, f"write {written} once for each item, where it belongs, and nowhere else")

    def _strays(self, token_ids: Sequence[int], places: Sequence[tuple[int, str]]) -> Iterator[Problem]:
        taken = {index + at for index, modality in places for at in range(len(self._placeholders[modality]))}
        for index, token in enumerate(token_ids):
            if token in self._reserved and index not in taken:
                says = f"is {token}, which stands for part of an item, and no whole placeholder is there"
                yield Problem(f"token {index}", says, "leave it out of the text")
                return


def _sources(modality: str, given: Any) -> list[Any]:
    """One item, or several, as a list."""
    if given is None:
        return []
    if isinstance(given, np.ndarray):
        several = (modality == "image" and given.ndim == 4) or (modality == "video" and given.ndim == 5)
        return list(given) if several else [given]
    if not isinstance(given, (list, tuple)):
        return [given]
    if modality != "video":
        return list(given)
    # A list of frames is one video; a pair with metadata is one too.
    pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping)
    frames = all(not isinstance(one, (str, list, tuple, Video)) and getattr(one, "ndim", 3) <= 3 for one in given)
    return [given] if pair or (given and frames) else list(given)


def content_hash(modality: str, media: Media, fingerprint: str) -> str:
    """A name for an item that only the same pixels, processed in the same way, have: 32 hexadecimal digits."""
    array, extra = (media.frames, media.fps) if isinstance(media, Video) else (media, None)
    head = json.dumps([modality, fingerprint, str(array.dtype), array.shape, extra])
    digest = blake2b(head.encode(), digest_size=16)
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _fingerprint(processor: MultiModalProcessor) -> str:
    cls = type(processor)
    return json.dumps([cls.__module__, cls.__qualname__, processor.settings()], sort_keys=True, default=str)
