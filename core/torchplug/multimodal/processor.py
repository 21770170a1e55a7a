"""What a model's processor is: it turns one decoded item into the tower's inputs and the tokens that it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torchplug.config import HfConfig
from torchplug.errors import ContractError, Problem
from torchplug.multimodal.media import Media, Video, load_array, load_image, load_video


class Batching(StrEnum):
    """How one input of several items becomes one keyword of `embed_multimodal`.

    STACK: tensors of one shape, [items, *shape]. CONCATENATE: along their first dimension, whose size may differ. LIST:
    as a list.
    """

    STACK = "stack"
    CONCATENATE = "concatenate"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a processor is made from.

    Attributes:
        hf_config: The model's config.json.
        directory: The checkpoint's directory, where its preprocessor_config.json may lie; None where there is none.
        encode: Token ids of a text, without special tokens around it; None without a tokenizer.
    """

    hf_config: HfConfig
    directory: Path | None = None
    encode: Callable[[str], list[int]] | None = None

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text that the processor itself puts into prompts.

        Raises ContractError without a tokenizer.
        """
        if self.encode is None:
            says = f"cannot write {text!r} into a prompt without a tokenizer"
            raise ContractError("multimodal processor", Problem("", says, "load the model with its tokenizer"))
        return self.encode(text)


@dataclass(frozen=True, slots=True)
class ProcessedItem:
    """What a processor makes of one item.

    Attributes:
        token_ids: Stand in the prompt in place of the placeholder.
        data: The tower's inputs of this item by name, CPU tensors; see `MultiModalProcessor.fields`.
        is_embed: bool [len(token_ids)], CPU: the tokens that receive an embedding; None means all of them.
    """

    token_ids: Sequence[int]
    data: Mapping[str, Tensor]
    is_embed: Tensor | None = field(default=None)

    @property
    def num_bytes(self) -> int:
        """Memory of the data."""
        return sum(tensor.nbytes for tensor in self.data.values())


class MultiModalProcessor(ABC):
    """Base of all processors. One is made for each loaded model: `Processor(context)`.

    An item is processed on its own, so what becomes of it never depends on its neighbours, and an item that comes again
    need not be processed again.
    """

    modalities: ClassVar[tuple[str, ...]] = ("image",)
    """What it takes, e.g. ("image", "video")."""

    fields: ClassVar[Mapping[str, Batching]]
    """Every name that `process` gives data under, and how the data of several items is put together."""

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @abstractmethod
    def placeholder(self, modality: str) -> Sequence[int]:
        """The token ids that stand for one item in a prompt as its author writes it; not empty."""

    @abstractmethod
    def process(self, modality: str, item: Any) -> ProcessedItem:
        """One item, decoded by `load`: inputs for the tower, and tokens for the prompt.

        Raises ValueError where the item cannot be used (too narrow, too long); the text says why.
        """

    def load(self, modality: str, source: Any, where: str) -> Media:
        """Decode what a caller gave: images to uint8 [height, width, 3], videos to `Video`, anything else to an array.

        Raises RequestError that names `where`.
        """
        if modality == "image":
            return load_image(source, where)
        return load_video(source, where) if modality == "video" else load_array(source, where)

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """Ids that may stand in a prompt only where an item is: those of all placeholders."""
        return frozenset(i for modality in self.modalities for i in self.placeholder(modality))

    def settings(self) -> Mapping[str, Any]:
        """What besides the item decides the result and may differ between two processors of this class; JSON-ready."""
        return {}

    def example(self, modality: str, index: int) -> Any:
        """An item to check the model with, as a caller would give it; each index another size.

        Here: random pixels, of a size that suits most vision models. Raises KeyError for a modality that it cannot
        make up; a processor of one overrides this.
        """
        random = np.random.default_rng(index)
        height, width = ((56, 84), (112, 56), (84, 112), (28, 28))[index % 4]
        if modality == "image":
            return random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if modality == "video":
            frames = (14, 4, 6, 2)[index % 4]  # the first is longer in time than it is wide, whatever the patches
            return Video(random.integers(0, 256, (frames, height, width, 3), dtype=np.uint8), fps=2.0)
        raise KeyError(modality)

    def batch(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Keywords of `embed_multimodal` for items of one modality, in order.

        Raises ContractError where the items have other names than `fields` or each other.
        """
        names = list(items[0]) if items else []
        for item in items:
            if list(item) != names or not set(names) <= set(self.fields):
                says = f"gives {', '.join(item)} where another item has {', '.join(names)}"
                fix = f"give every item of a modality the same names, out of `fields`: {', '.join(self.fields)}"
                where = f"{type(self).__name__}.process"
                raise ContractError("multimodal processor", Problem(where, says, fix))
        return {name: _batched([item[name] for item in items], self.fields[name]) for name in names}


def _batched(values: list[Tensor], batching: Batching) -> Any:
    if batching is Batching.STACK:
        return torch.stack(values)
    return torch.cat(values) if batching is Batching.CONCATENATE else values
