"""Multimodal rows in a batch of text embeddings: the checked merge, and looking up text rows only.

Everything is checked before anything is written. Plain indexing would spread one row, or one column, over all
placeholders without a word, and a cast to float16 turns large values into inf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchplug.errors import ContractError, Problem
from torchplug.results import describe

if TYPE_CHECKING:
    from torchplug.interfaces import MultiModalEmbeddings

_ONE_PER_ITEM = "return one [tokens, hidden] tensor per item from embed_multimodal, projected to the text model's width"


def _merge_multimodal_embeddings(
    inputs_embeds: Tensor,
    multimodal_embeddings: MultiModalEmbeddings,
    is_multimodal: Tensor,
) -> Tensor:
    """Write the rows of `multimodal_embeddings`, in order, over the rows of `inputs_embeds` that the mask marks.

    Args:
        inputs_embeds: floating [n, hidden]; written in place.
        multimodal_embeddings: floating [n_i, hidden] tensors, or one [items, n_i, hidden] tensor, on the device of
            `inputs_embeds`; cast to its dtype.
        is_multimodal: bool [n], on any device; not modified. On a device it costs one synchronisation, on the CPU none.

    Returns:
        `inputs_embeds`.

    Raises:
        ContractError: Rows and placeholders differ in number, an item has another width, rank or device, or a finite
            value does not fit in the dtype. `inputs_embeds` is untouched then.
    """
    _check_mask(is_multimodal, inputs_embeds.shape[0])
    items = _items(multimodal_embeddings)
    problems = list(_item_problems(items, inputs_embeds))
    if problems:
        raise ContractError("multimodal embeddings", problems)
    places = is_multimodal.nonzero().squeeze(1)
    _check_count([item.shape[0] for item in items], places.shape[0])
    if not places.shape[0]:
        return inputs_embeds
    rows = _cast(items, inputs_embeds.dtype)
    return inputs_embeds.index_copy_(0, places.to(inputs_embeds.device), rows)


def _require_is_multimodal(is_multimodal: Tensor | None) -> Tensor:
    """The mask, which embeddings cannot be placed without.

    Raises:
        ContractError: It is None.
    """
    if is_multimodal is None:
        says = "is None although multimodal_embeddings are given, so their places are unknown"
        fix = "pass is_multimodal, a bool tensor [tokens] that is True at the placeholder tokens"
        raise ContractError("embed_input_ids", Problem("is_multimodal", says, fix))
    return is_multimodal


def embed_text_rows(input_ids: Tensor, embed: Callable[[Tensor], Tensor], is_multimodal: Tensor) -> Tensor:
    """Embed the text tokens only, for placeholder ids that lie outside the vocabulary.

    Args:
        input_ids: int64 [n].
        embed: int64 [m] -> [m, hidden]; it never sees a placeholder's id.
        is_multimodal: bool [n], True at placeholders, on any device; not modified.

    Returns:
        [n, hidden] in the dtype and on the device of what `embed` returns; placeholder rows are zero.

    Raises:
        ContractError: The mask does not fit the ids, or `embed` does not return one row per id.
    """
    _check_mask(is_multimodal, input_ids.shape[0])
    places = (~is_multimodal).nonzero().squeeze(1)
    if places.shape[0] == input_ids.shape[0]:
        return embed(input_ids)
    text = embed(input_ids[places.to(input_ids.device)])
    if text.dim() != 2 or text.shape[0] != places.shape[0]:
        says = f"returned {describe(text)} for {places.shape[0]} token ids, expected one row per id"
        fix = "embed_input_ids(input_ids) of the language model returns [tokens, hidden]"
        raise ContractError("text embeddings", Problem("embed_input_ids", says, fix))
    # Not torch.empty: if no embeddings follow, the placeholder rows stay as they are made here.
    embeds = text.new_zeros(input_ids.shape[0], text.shape[1])
    return embeds.index_copy_(0, places.to(text.device), text)


def _check_mask(is_multimodal: Tensor, tokens: int) -> None:
    if is_multimodal.dtype is torch.bool and tuple(is_multimodal.shape) == (tokens,):
        return
    says = f"is {describe(is_multimodal)}, expected bool[{tokens}], one entry per token"
    raise ContractError("embed_input_ids", Problem("is_multimodal", says, "pass a flat bool mask over input_ids"))


def _items(embeddings: MultiModalEmbeddings) -> Sequence[Tensor]:
    if isinstance(embeddings, Tensor):
        if embeddings.dim() == 3:
            return embeddings.unbind(0)
        says = f"is one {describe(embeddings)} tensor, expected [items, tokens, hidden] or a list of [tokens, hidden]"
        fix = "put it in a list if it is one item" if embeddings.dim() == 2 else _ONE_PER_ITEM
        raise ContractError("multimodal embeddings", Problem("multimodal_embeddings", says, fix))
    if not isinstance(embeddings, (list, tuple)):
        says = f"is a {type(embeddings).__name__}, expected a list or tuple of tensors, or one tensor"
        raise ContractError("multimodal embeddings", Problem("multimodal_embeddings", says, _ONE_PER_ITEM))
    return embeddings


def _item_problems(items: Sequence[Tensor], inputs_embeds: Tensor) -> Iterator[Problem]:
    hidden, device = inputs_embeds.shape[1], inputs_embeds.device
    for index, item in enumerate(items):
        where = f"multimodal_embeddings, item {index}"
        if not isinstance(item, Tensor):
            yield Problem(where, f"is a {type(item).__name__}, expected a tensor", _ONE_PER_ITEM)
        elif item.dim() != 2 or item.shape[1] != hidden or not item.is_floating_point():
            yield Problem(where, f"is {describe(item)}, expected floating [tokens, {hidden}]", _ONE_PER_ITEM)
        elif item.device != device:
            says = f"is on {item.device}, the text embeddings are on {device}"
            yield Problem(where, says, "leave the result of embed_multimodal on the model's device")


def _check_count(rows: Sequence[int], placeholders: int) -> None:
    found = sum(rows)
    if found == placeholders:
        return
    parts = " + ".join(map(str, rows[:8])) + (f" + ... ({len(rows)} items)" if len(rows) > 8 else "")
    says = f"{parts} = {found} embedding rows for {placeholders} placeholder tokens"
    fix = "the processor and embed_multimodal must agree on the tokens of each item, and is_multimodal mark just those"
    raise ContractError("multimodal embeddings", Problem("multimodal_embeddings", says, fix))


def _cast(items: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """All rows as one [rows, hidden] tensor of `dtype`; finite values stay finite."""
    cast = torch.cat([item.to(dtype) for item in items])
    limit = torch.finfo(dtype).max
    wider = [item for item in items if torch.finfo(item.dtype).max > limit]
    if wider and bool(cast.isinf().any()):
        for index, item in enumerate(items):
            lost = item.isfinite() & item.to(dtype).isinf()
            if bool(lost.any()):
                largest = float(item[lost].abs().max())
                says = f"{int(lost.sum())} values, the largest {largest:.4g}, exceed what {dtype} holds, {limit:.4g}"
                fix = "load the model in bfloat16 or float32, or scale the encoder's output"
                raise ContractError("multimodal embeddings", Problem(f"multimodal_embeddings, item {index}", says, fix))
    return cast
