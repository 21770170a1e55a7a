"""The vision-language checkpoints of the oracle tests, prompts with items in them, and both sides' answers to one.

A prompt is written as its parts: token ids, and items by the size of their grid. It is asked of our module by hand,
without an engine: embed the items, merge, one forward over [3, n] positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import torch
import transformers
from checkpoints import Continuation
from torch import Tensor
from torchplug.interfaces import MultiModalFeatureSpec, PlaceholderRange

VOCAB = 307
IMAGE, VIDEO, VISION_START, VISION_END = 300, 301, 302, 303
TEXT_IDS = 300
"""Random text is below this: no special token."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 3]}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 60,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": _ROPE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
_QWEN3_ROPE = _ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True}

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": _TOKENS
    | {
        "tie_word_embeddings": False,
        "text_config": _TEXT,
        "vision_config": {
            "depth": 2,
            "embed_dim": 36,
            "hidden_size": 60,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 2,
            "num_heads": 3,
            "patch_size": 4,
        },
    },
    "Qwen2_5_VLForConditionalGeneration": _TOKENS
    | {
        "tie_word_embeddings": False,
        "text_config": _TEXT,
        "vision_config": {
            "depth": 3,
            "hidden_size": 36,
            "out_hidden_size": 60,
            "intermediate_size": 53,
            "num_heads": 3,
            "patch_size": 4,
            "window_size": 16,
            "tokens_per_second": 2,
            "fullatt_block_indexes": [1],
        },
    },
    "Qwen3VLForConditionalGeneration": _TOKENS
    | {
        "tie_word_embeddings": False,
        "text_config": _TEXT | {"head_dim": 12, "rope_parameters": _QWEN3_ROPE},
        "vision_config": {
            "depth": 3,
            "hidden_size": 36,
            "out_hidden_size": 60,
            "intermediate_size": 53,
            "num_heads": 3,
            "patch_size": 4,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
    },
    "LlavaForConditionalGeneration": {
        "image_token_index": IMAGE,
        "tie_word_embeddings": False,
        "text_config": {key: value for key, value in _TEXT.items() if key != "rope_parameters"}
        | {"model_type": "llama", "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 36,
            "intermediate_size": 53,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 18,
            "patch_size": 5,
        },
    },
}


@dataclass(frozen=True)
class Item:
    """An image or a video by its grid of patches (frames, rows, columns); `seconds` of one frame of a video's grid."""

    modality: str
    grid: tuple[int, int, int]
    seconds: float = 1.0


Part = "int | Item"


def image(rows: int, columns: int) -> Item:
    return Item("image", (1, rows, columns))


def video(frames: int, rows: int, columns: int, seconds: float = 1.0) -> Item:
    return Item("video", (frames, rows, columns), seconds)


@dataclass(frozen=True)
class Case:
    """One checkpoint: what it `changes` in its family, keys with a dot going into the nested config."""

    family: str
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    flat: bool = False
    """Write the text config beside vision_config, as in the first published checkpoints."""
    old_names: bool = True
    """Weight names as published; False: as modules are called in transformers 5."""

    @property
    def config(self) -> dict[str, Any]:
        config = {key: dict(v) if isinstance(v, dict) else v for key, v in FAMILIES[self.family].items()}
        for key, value in self.changes.items():
            outer, _, inner = key.rpartition(".")
            (config[outer] if outer else config)[inner] = value
        return config


def text(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TEXT_IDS, (length,), generator=generator).tolist()


@dataclass(frozen=True)
class Prompt:
    """An expanded prompt, its items' features in prompt order, and what the towers are given."""

    token_ids: tuple[int, ...]
    features: tuple[MultiModalFeatureSpec, ...]

    @property
    def token_types(self) -> Tensor:
        """1 where an image is, 2 where a video, as transformers' processors say it."""
        types = torch.zeros(len(self.token_ids), dtype=torch.int64)
        for feature in self.features:
            types[self.places(feature)] = 1 if feature.modality == "image" else 2
        return types

    @property
    def is_multimodal(self) -> Tensor:
        return self.token_types > 0

    @staticmethod
    def places(feature: MultiModalFeatureSpec) -> Tensor:
        place = feature.mm_position
        rows = torch.arange(place.length) if place.is_embed is None else place.is_embed.nonzero().squeeze(1)
        return rows + place.offset

    def tower_kwargs(self, modality: str | None = None) -> dict[str, Any]:
        """The items' data, those of a modality or all, as `embed_multimodal` takes them."""
        data = [f.data for f in self.features if f.data and modality in (None, f.modality)]
        gathered: dict[str, Any] = {}
        for name in dict.fromkeys(name for one in data for name in one):
            values = [one[name] for one in data if name in one]
            patches = name.startswith("pixel_values") and values[0].dim() == 2
            gathered[name] = torch.cat(values) if patches else torch.stack(values)
        return gathered


def prompt_of(case: Case, parts: Sequence[Any], seed: int = 0) -> Prompt:
    """Expand `parts`: token ids and lists of them, and items, whose pixels are random."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    features = []
    for part in parts:
        if not isinstance(part, Item):
            ids += part if isinstance(part, list) else [part]
            continue
        tokens, is_embed, data = _expanded(case, part, generator)
        place = PlaceholderRange(len(ids), len(tokens), is_embed)
        features.append(MultiModalFeatureSpec(part.modality, place, data))
        ids += tokens
    return Prompt(tuple(ids), tuple(features))


def _expanded(case: Case, item: Item, generator: torch.Generator) -> tuple[list[int], Tensor | None, dict[str, Tensor]]:
    vision = case.config["vision_config"]
    if case.family.startswith("Llava"):
        size = vision["image_size"]
        has_class = vision["model_type"] == "clip_vision_model"
        drops = case.config.get("vision_feature_select_strategy", "default") == "default"
        count = (size // vision["patch_size"]) ** 2 + has_class - drops
        return [IMAGE] * count, None, {"pixel_values": torch.randn(3, size, size, generator=generator)}
    frames, rows, columns = item.grid
    patches = torch.randn(frames * rows * columns, 3 * 2 * vision["patch_size"] ** 2, generator=generator)
    grid, per_frame = torch.tensor(item.grid), rows * columns // 4
    if item.modality == "image":
        return [IMAGE] * (frames * per_frame), None, {"pixel_values": patches, "image_grid_thw": grid}
    data = {"pixel_values_videos": patches, "video_grid_thw": grid}
    if case.family.startswith("Qwen3"):
        tokens: list[int] = []
        for frame in range(frames):
            tokens += [7 + frame, VISION_START, *[VIDEO] * per_frame, VISION_END]
        return tokens, torch.tensor(tokens) == VIDEO, data
    if case.family.startswith("Qwen2_5"):
        data["second_per_grid_ts"] = torch.tensor(item.seconds)
    return [VIDEO] * (frames * per_frame), None, data


# -- both sides -------------------------------------------------------------------------------------------------------


def write_case(case: Case, directory: Path) -> Path:
    """The checkpoint of a case, random as all of them."""
    checkpoints.write_checkpoint(directory, case.config, seed=case.seed, model_class=case.family)
    if case.flat:
        config = checkpoints.read_config(directory)
        checkpoints.write_config(directory, config.pop("text_config") | config)
    if not case.old_names:
        names = list(getattr(transformers, case.family)(_config(case)).state_dict())
        by_end = {_end(name): name for name in names}

        def rename(weights: dict[str, Tensor]) -> None:
            for name in list(weights):
                weights[by_end[_end(name)]] = weights.pop(name)

        checkpoints.edit_weights(directory, rename)
    return directory


def _config(case: Case) -> Any:
    return getattr(transformers, case.family).config_class(**case.config)


def _end(name: str) -> str:
    """A tensor's name without what the two orders of parts call differently."""
    for part in ("language_model.", "vision_model.", "model."):
        name = name.replace(part, "")
    return name


def oracle_model(case: Case, directory: Path) -> Any:
    """transformers' model of a checkpoint directory, float32, on the CPU, plain matrix-product attention."""
    cls = getattr(transformers, case.family)
    return cls.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def oracle_inputs(case: Case, prompt: Prompt) -> dict[str, Any]:
    inputs = prompt.tower_kwargs()
    if not case.family.startswith("Llava"):
        inputs["mm_token_type_ids"] = prompt.token_types[None]
    return inputs


def oracle_logits(case: Case, model: Any, prompt: Prompt, positions: Tensor | None = None) -> Tensor:
    """Logits of every position [n, vocab]; `positions` [3, n] in place of the oracle's own."""
    inputs = oracle_inputs(case, prompt)
    if positions is not None:
        inputs["position_ids"] = positions[:, None]
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt.token_ids]), use_cache=False, **inputs).logits[0]
    return logits


def oracle_continuation(case: Case, model: Any, prompt: Prompt, steps: int = checkpoints.STEPS) -> Continuation:
    """Greedy continuation as `generate` of transformers makes it, with its cache and its own positions."""
    inputs = torch.tensor([prompt.token_ids])
    result = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        min_new_tokens=steps,
        max_new_tokens=steps,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **oracle_inputs(case, prompt),
    )
    best = torch.stack(result.logits)[:, 0].topk(2, dim=-1).values
    tokens = tuple(result.sequences[0, len(prompt.token_ids) :].tolist())
    return Continuation(prompt.token_ids, tokens, tuple((best[:, 0] - best[:, 1]).tolist()))


def our_embeds(model: Any, prompt: Prompt, token_ids: Sequence[int] | None = None) -> Tensor:
    """Merged embeddings [n, hidden] of the prompt; of `token_ids`, which begin with it, if they are given."""
    ids = torch.tensor(prompt.token_ids if token_ids is None else token_ids)
    rows = []
    for modality in dict.fromkeys(feature.modality for feature in prompt.features):
        found = model.hooks.embed_multimodal(**prompt.tower_kwargs(modality))
        rows += zip([f for f in prompt.features if f.modality == modality], found, strict=True)
    rows.sort(key=lambda pair: pair[0].mm_position.offset)
    mask = torch.zeros(len(ids), dtype=torch.bool)
    mask[: len(prompt.token_ids)] = prompt.is_multimodal
    if not rows:
        return model.hooks.embed_input_ids(ids)
    return model.hooks.embed_input_ids(ids, [row for _, row in rows], is_multimodal=mask)


def our_positions(model: Any, prompt: Prompt) -> tuple[Tensor, int]:
    """[3, n] and the delta; [n] and 0 for a model with plain positions."""
    if "SupportsMRoPE" not in model.interfaces:
        return torch.arange(len(prompt.token_ids)), 0
    return model.hooks.get_mrope_input_positions(input_tokens=list(prompt.token_ids), mm_features=list(prompt.features))


def our_logits(model: Any, prompt: Prompt) -> Tensor:
    """Logits of every position [n, vocab] through the loaded module, without a cache or a forward context."""
    with torch.inference_mode():
        embeds = our_embeds(model, prompt)
        positions, _ = our_positions(model, prompt)
        hidden_states = model.module(None, positions, inputs_embeds=embeds)
        logits: Tensor = model.module.compute_logits(hidden_states)
    return logits


def our_continuation(model: Any, prompt: Prompt, steps: int = checkpoints.STEPS) -> list[int]:
    """Greedy continuation, the whole text in every step."""
    ids = list(prompt.token_ids)
    with torch.inference_mode():
        positions, delta = our_positions(model, prompt)
        for _ in range(steps):
            embeds = our_embeds(model, prompt, ids)
            hidden_states = model.module(None, positions, inputs_embeds=embeds)
            following = torch.full_like(positions[..., :1], len(ids) + delta)
            ids.append(int(model.module.compute_logits(hidden_states[-1:]).argmax()))
            positions = torch.cat((positions, following), dim=-1)
    return ids[len(prompt.token_ids) :]


# -- the cases --------------------------------------------------------------------------------------------------------


def _qwen2(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("Qwen2VLForConditionalGeneration", seed, changes or {}, **more)


def _qwen2_5(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("Qwen2_5_VLForConditionalGeneration", seed, changes or {}, **more)


def _qwen3(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("Qwen3VLForConditionalGeneration", seed, changes or {}, **more)


def _llava(seed: int, changes: Mapping[str, Any] | None = None, **more: Any) -> Case:
    return Case("LlavaForConditionalGeneration", seed, changes or {}, **more)


def _llava_text(kind: str, **more: Any) -> dict[str, Any]:
    return {"text_config": FAMILIES["LlavaForConditionalGeneration"]["text_config"] | {"model_type": kind} | more}


_SIGLIP = {
    "vision_config": FAMILIES["LlavaForConditionalGeneration"]["vision_config"]
    | {"model_type": "siglip_vision_model", "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "vision_feature_select_strategy": "full",
}
_YARN = _ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, Case] = {
    "qwen2_vl": _qwen2(0),
    "qwen2_vl-tied": _qwen2(0, {"tie_word_embeddings": True}),
    "qwen2_vl-flat_config": _qwen2(0, flat=True),
    "qwen2_vl-new_names": _qwen2(0, old_names=False),
    "qwen2_vl-yarn": _qwen2(0, {"text_config.rope_parameters": _YARN}),
    "qwen2_vl-one_head_gelu_tower": _qwen2(
        0, {"vision_config.num_heads": 1, "vision_config.hidden_act": "gelu", "vision_config.depth": 1}
    ),
    "qwen2_5_vl": _qwen2_5(1),
    "qwen2_5_vl-windows_everywhere": _qwen2_5(0, {"vision_config.fullatt_block_indexes": []}),
    "qwen2_5_vl-windows_of_3": _qwen2_5(0, {"vision_config.window_size": 25}),
    "qwen2_5_vl-new_names_tied": _qwen2_5(0, {"tie_word_embeddings": True}, old_names=False),
    "qwen3_vl": _qwen3(1),
    "qwen3_vl-tied": _qwen3(0, {"tie_word_embeddings": True}),
    "qwen3_vl-no_deepstack": _qwen3(1, {"vision_config.deepstack_visual_indexes": []}),
    "qwen3_vl-section_of_4_1_1": _qwen3(0, {"text_config.rope_parameters": _QWEN3_ROPE | {"mrope_section": [4, 1, 1]}}),
    "llava": _llava(0),
    "llava-new_names": _llava(0, old_names=False),
    "llava-full_tower_with_class_token": _llava(
        0, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    ),
    "llava-two_layers_no_projector_bias": _llava(
        0, {"vision_feature_layer": [1, -2], "multimodal_projector_bias": False}
    ),
    "llava-siglip": _llava(0, _SIGLIP),
    "llava-mistral": _llava(0, _llava_text("mistral", sliding_window=8)),
    "llava-qwen2_tied": _llava(0, _llava_text("qwen2") | {"tie_word_embeddings": True}),
    "llava-qwen3": _llava(3, _llava_text("qwen3")),
}


def prompts_of(case: Case) -> dict[str, Prompt]:
    """Text alone, an image, several of different sizes between text, an image at either end.

    The last is for logits only: after a prompt that ends with an item, transformers' `generate` goes on from each row's
    last position, where the model itself, and the paper, go on from the greatest.
    """
    start, end = ([], []) if case.family.startswith("Llava") else ([VISION_START], [VISION_END])

    def shown(item: Item) -> list[Any]:
        return [*start, item, *end]

    layouts = {
        "text": [text(9)],
        "one image": [text(4), *shown(image(4, 6)), text(5, seed=1)],
        "three images": [
            *text(3), *shown(image(6, 10)), *text(2, seed=1), *shown(image(2, 2)), *shown(image(8, 4)), *text(4, seed=2)
        ],
        "images at both ends": [image(2, 6), *text(5), image(6, 2)],
    }  # fmt: skip
    return {name: prompt_of(case, parts, seed=index) for index, (name, parts) in enumerate(layouts.items())}


def continued(prompt: Prompt) -> bool:
    """Whether transformers continues a prompt from the right positions: it does not end with an item."""
    return not bool(prompt.is_multimodal[-1])


def video_prompt_of(case: Case) -> Prompt:
    """A video longer than it is wide, an image, a short video."""
    parts = [*text(4), video(5, 4, 2, 1.5), *text(3, seed=1), image(4, 4), *text(2, seed=2), video(1, 2, 8), *text(3)]
    return prompt_of(case, parts, seed=9)
