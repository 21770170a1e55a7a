"""Checks of images, videos and the like: as many embeddings as the prompt has places, in its order, and M-RoPE's table.

The items are the processor's own examples, of several sizes, in one prompt; nothing here knows a particular modality.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from torchplug import interfaces
from torchplug.errors import Problem
from torchplug.host.model import LoadedModel
from torchplug.interfaces import MultiModalFeatureSpec
from torchplug.multimodal import MULTIMODAL_REGISTRY, MultiModalInputProcessor, MultiModalInputs, ProcessorContext
from torchplug.results import describe
from torchplug.testing.findings import Finding
from torchplug.testing.specimen import Skip, Specimen

_ITEMS: Final = 3
_TEXT: Final = (3, 2, 0, 4)
"""Text tokens before the first item, between the items, and after the last."""
_TOLERANCE: Final = 1e-3
_FIX_COUNT: Final = "return one [tokens, hidden] tensor per item, a row for each of its places in the prompt"


def multimodal_counts(specimen: Specimen) -> Iterator[Finding]:
    """A row for every place of every item, which arrives there unchanged, while text stays what it was."""
    _need(specimen, "SupportsMultiModal")
    inputs = _inputs_of(specimen)
    for device in specimen.devices:
        model = specimen.load(device)
        for modality, prompt in _prompts(specimen, inputs):
            found = _embedded(model, inputs, prompt.features)
            problems = list(_miscounted(specimen, modality, found, prompt.features))
            yield from problems or _mismerged(specimen, model, modality, found, prompt)


def multimodal_order(specimen: Specimen) -> Iterator[Finding]:
    """An item's rows are the same alone and among others, at the item's place in the order that was given."""
    _need(specimen, "SupportsMultiModal")
    inputs = _inputs_of(specimen)
    for device in specimen.devices:
        model = specimen.load(device)
        for modality, prompt in _prompts(specimen, inputs):
            alone = [_embedded(model, inputs, [feature])[0] for feature in prompt.features]
            for order in (range(_ITEMS), range(_ITEMS - 1, -1, -1)):
                together = _embedded(model, inputs, [prompt.features[i] for i in order])
                wrong = next((at for at, i in enumerate(order) if not _same(together[at], alone[i])), None)
                if wrong is None:
                    continue
                fits = [i for i in range(_ITEMS) if _same(together[wrong], alone[i])]
                whose = f"those of item {fits[0]}" if fits else "those of no item alone"
                says = (
                    f"{modality} items {list(order)} in one call: expected the rows of item {order[wrong]} "
                    f"at place {wrong}, found {whose}"
                )
                fix = "keep the order of the keywords' items, and let no item see another"
                yield Problem(specimen.where("embed_multimodal"), says, fix)
                break


def mrope_positions(specimen: Specimen) -> Iterator[Finding]:
    """A column for every token; plain positions for text; after an item, more than all inside; the delta goes on."""
    _need(specimen, "SupportsMRoPE")
    model = specimen.load(specimen.devices[0])
    where = specimen.where("get_mrope_input_positions")
    text = specimen.token_ids(7)
    positions, delta = model.hooks.get_mrope_input_positions(text, [])
    if not torch.equal(positions, torch.arange(len(text)).expand(positions.shape[0], -1)) or delta:
        says = f"text of {len(text)} tokens: expected 0 to {len(text) - 1} in every row and delta 0, found "
        yield Problem(where, f"{says}{positions.tolist()} and {delta}", "count text on, one position per token")
        return
    if not _takes_items(specimen):
        yield "text alone: no processor is registered for the class, so there are no items to check with"
        return
    for modality, prompt in _prompts(specimen, _inputs_of(specimen)):
        yield from _mrope_problems(model, where, modality, prompt)


def _mrope_problems(model: LoadedModel, where: str, modality: str, prompt: MultiModalInputs) -> Iterator[Problem]:
    tokens = len(prompt.token_ids)
    positions, delta = model.hooks.get_mrope_input_positions(prompt.token_ids, list(prompt.features))
    if positions.shape[1] != tokens:
        says = f"prompt of {tokens} tokens with {modality} items: expected as many columns, found {positions.shape[1]}"
        yield Problem(where, says, "give a position to every token of the expanded prompt")
        return
    for index, feature in enumerate(prompt.features):
        place = feature.mm_position
        end = place.offset + place.length
        inside, after = positions[:, place.offset : end], positions[:, end:]
        if after.numel() and int(after.min()) <= int(inside.max()):
            says = (
                f"after {modality} item {index}: expected positions above all inside, which reach {int(inside.max())}; "
                f"found {int(after.min())}"
            )
            yield Problem(where, says, "go on from the greatest position inside the item, over all rows, plus 1")
            return
    expected = int(positions.max()) + 1 - tokens
    if delta != expected:
        says = f"prompt of {tokens} tokens with {modality} items, greatest position {int(positions.max())}: expected "
        fix = "delta = positions.max() + 1 - len(input_tokens)"
        yield Problem(where, f"{says}delta {expected}, found {delta}", fix)
    again, _ = model.hooks.get_mrope_input_positions(prompt.token_ids, list(reversed(prompt.features)))
    if not torch.equal(again, positions):
        says = f"the same {modality} items in reverse order: expected the same positions, found others"
        yield Problem(where, says, "sort the features by mm_position.offset")


def _miscounted(
    specimen: Specimen, modality: str, found: Sequence[Tensor], features: Sequence[MultiModalFeatureSpec]
) -> Iterator[Problem]:
    where = specimen.where("embed_multimodal")
    if len(found) != len(features):
        says = f"{len(features)} {modality} items: expected as many tensors, found {len(found)}"
        yield Problem(where, says, _FIX_COUNT)
        return
    for index, (rows, feature) in enumerate(zip(found, features, strict=True)):
        places = feature.mm_position.num_embeds
        if rows.shape[0] != places:
            says = f"{modality} item {index}: expected {places} rows, one per place in the prompt, found "
            yield Problem(where, says + describe(rows), _FIX_COUNT)
        elif not bool(rows.isfinite().all()):
            says = f"{modality} item {index}: expected finite numbers, found others"
            yield Problem(where, says, "look for overflow, 0/0 and memory that nobody wrote")


def _mismerged(
    specimen: Specimen, model: LoadedModel, modality: str, found: list[Tensor], prompt: MultiModalInputs
) -> Iterator[Problem]:
    """What `embed_input_ids` makes of the rows; its own check of counts and widths raises."""
    ids = torch.tensor(prompt.token_ids, device=model.device)
    mask = _is_multimodal(prompt)
    # Placeholders may lie outside the vocabulary; what is looked up for them is overwritten.
    plain = ids.where(~mask.to(model.device), 0)
    rows = torch.cat(found).to(model.dtype)
    with torch.inference_mode():
        text = model.hooks.embed_input_ids(plain)
        merged = model.hooks.embed_input_ids(plain, found, is_multimodal=mask)
    where = specimen.where("embed_input_ids")
    if merged.shape[0] != len(ids) or merged.shape[1] != rows.shape[1]:
        says = f"expected [{len(ids)}, {rows.shape[1]}] with {modality} items merged, found {describe(merged)}"
        yield Problem(where, says, "return a row per token, of the width that embed_multimodal returns")
    elif not torch.equal(merged[mask], rows):
        says = f"expected the rows of the {modality} items at their places, unchanged; found others"
        yield Problem(where, says, "use torchplug.layers.merge_multimodal_embeddings, which refuses to broadcast")
    elif not torch.equal(merged[~mask][:, : text.shape[1]], text[~mask]):
        says = f"expected text beside {modality} items to be embedded as without them, found a difference"
        yield Problem(where, says, "write the items' rows at is_multimodal, and nowhere else")


# -- examples ---------------------------------------------------------------------------------------------------------


def _need(specimen: Specimen, interface: str) -> None:
    if interface not in specimen.report.interfaces:
        raise Skip(f"the class does not claim {interface}")
    if interface == "SupportsMultiModal":
        if interfaces.supports_multimodal_raw_input_only(specimen.cls):
            raise Skip("the class takes its items raw, in forward")
        if not _takes_items(specimen):
            raise Skip("no processor is registered for the class (MULTIMODAL_REGISTRY.register_processor)")


def _takes_items(specimen: Specimen) -> bool:
    return MULTIMODAL_REGISTRY.processor_factory(specimen.cls) is not None


def _inputs_of(specimen: Specimen) -> MultiModalInputProcessor:
    """The class's own processor, with the checkpoint's tokenizer and settings where there are any."""
    checkpoint, encode = specimen.checkpoint, _letters
    directory = None
    if not specimen.is_tiny:
        tokenizer = checkpoint.tokenizer()
        directory = checkpoint.path if checkpoint.path.is_dir() else None

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

    context = ProcessorContext(specimen.vllm_config.model_config.hf_config, directory, encode)
    return MultiModalInputProcessor(MULTIMODAL_REGISTRY.create_processor(specimen.cls, context))


def _prompts(specimen: Specimen, inputs: MultiModalInputProcessor) -> Iterator[tuple[str, MultiModalInputs]]:
    """Of each modality a prompt with several examples between text."""
    processor = inputs.processor
    words = [token for token in specimen.token_ids(64) if token not in processor.reserved_token_ids] or [0]
    for modality in processor.modalities:
        ids: list[int] = []
        for index, length in enumerate(_TEXT):
            ids += (words * length)[:length]
            if index < _ITEMS:
                ids += processor.placeholder(modality)
        examples = [processor.example(modality, index) for index in range(_ITEMS)]
        yield modality, inputs(ids, {modality: examples})


def _letters(text: str) -> list[int]:
    """Stands for a tokenizer where there is none: a token per letter."""
    return [1 + ord(letter) % 7 for letter in text]


def _embedded(
    model: LoadedModel, inputs: MultiModalInputProcessor, features: Sequence[MultiModalFeatureSpec]
) -> list[Tensor]:
    with torch.inference_mode():
        return list(model.hooks.embed_multimodal(**inputs.embed_kwargs(features)))


def _is_multimodal(prompt: MultiModalInputs) -> Tensor:
    mask = torch.zeros(len(prompt.token_ids), dtype=torch.bool)
    for feature in prompt.features:
        place = feature.mm_position
        span = torch.ones(place.length, dtype=torch.bool) if place.is_embed is None else place.is_embed
        mask[place.offset : place.offset + place.length] |= span
    return mask


def _same(rows: Tensor, others: Tensor) -> bool:
    if rows.shape != others.shape:
        return False
    scale = float(others.abs().max()) or 1.0
    return bool(((rows - others).abs().max() <= _TOLERANCE * scale).item())
