"""LLaVA 1.5: a vision tower's features through a small MLP into the prompt of a language model.

Source: Liu et al., Improved Baselines with Visual Instruction Tuning, 2023, section 3; config and weight names as in
transformers' LlavaForConditionalGeneration, in the order of the published checkpoints (`language_model.model`,
`vision_tower.vision_model`) and in that of transformers 5 (`model.language_model`, `model.vision_tower`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn
from torchplug import CheckpointError, Problem, VllmConfig, hookimpl
from torchplug.interfaces import SupportsMultiModal
from torchplug.layers import Linear, get_act_fn, load_weights
from torchplug.multimodal import (
    MULTIMODAL_REGISTRY,
    Batching,
    MultiModalProcessor,
    ProcessedItem,
    hf_image_processor,
)

from torchplug_models.clip_vision import ClipVisionTower, is_siglip
from torchplug_models.llama import LlamaForCausalLM
from torchplug_models.mistral import MistralForCausalLM
from torchplug_models.qwen2 import Qwen2ForCausalLM
from torchplug_models.qwen3 import Qwen3ForCausalLM

LANGUAGE_MODELS: dict[str, type[LlamaForCausalLM]] = {
    "llama": LlamaForCausalLM,
    "mistral": MistralForCausalLM,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}
"""By `text_config.model_type`."""

CHECKPOINT_PREFIXES = {
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}


class LlavaProjector(nn.Module):
    def __init__(self, width: int, hidden_size: int, act: str, *, bias: bool) -> None:
        super().__init__()
        self.linear_1 = Linear(width, hidden_size, bias)
        self.act = get_act_fn(act)
        self.linear_2 = Linear(hidden_size, hidden_size, bias)

    def forward(self, features: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(features)))


class LlavaProcessor(MultiModalProcessor):
    """One `<image>` becomes as many as the tower gives features; images are cropped to its size."""

    fields: ClassVar[Mapping[str, Batching]] = {"pixel_values": Batching.STACK}

    @cached_property
    def images(self) -> Any:
        """transformers' image processor of the tower."""
        vision = self.context.hf_config.vision_config
        size = {"height": vision.image_size, "width": vision.image_size}
        if is_siglip(vision):
            return hf_image_processor("SiglipImageProcessorPil", self.context, size=size)
        shortest = {"shortest_edge": vision.image_size}
        return hf_image_processor("CLIPImageProcessorPil", self.context, defaults={"size": shortest}, crop_size=size)

    def settings(self) -> Mapping[str, Any]:
        return {"images": self.images.to_dict()}

    def placeholder(self, modality: str) -> Sequence[int]:
        config = self.context.hf_config
        return [config.image_token_id if "image_token_id" in config else config.image_token_index]

    def process(self, modality: str, item: Any) -> ProcessedItem:
        made = self.images(images=[item], return_tensors="pt", input_data_format="channels_last")
        tokens = list(self.placeholder(modality)) * num_features(self.context.hf_config)
        return ProcessedItem(tokens, {"pixel_values": made["pixel_values"][0]})


def num_features(config: Any) -> int:
    """Tokens that an image takes in the prompt."""
    vision = config.vision_config
    class_token = not is_siglip(vision)
    return (vision.image_size // vision.patch_size) ** 2 + class_token - drops_first(config)


def drops_first(config: Any) -> bool:
    """Whether the first feature, CLIP's class token, is left out."""
    return bool(config.vision_feature_select_strategy == "default")


@MULTIMODAL_REGISTRY.register_processor(LlavaProcessor)
class LlavaForConditionalGeneration(nn.Module, SupportsMultiModal):
    """LLaVA with the language model that its config names."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = LlamaForCausalLM.packed_modules_mapping
    config_defaults: ClassVar[dict[str, Any]] = {
        "image_token_index": 32000,
        "projector_hidden_act": "gelu",
        "vision_feature_select_strategy": "default",
        "multimodal_projector_bias": True,
        "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_channels": 3,
            "image_size": 224,
            "patch_size": 32,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
        },
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        kind = config.text_config.get("model_type", "llama")
        if kind not in LANGUAGE_MODELS:
            fix = f"use a checkpoint whose language model is one of {', '.join(LANGUAGE_MODELS)}"
            raise CheckpointError("checkpoint config", Problem("text_config.model_type", f"is {kind!r}", fix))
        language = LANGUAGE_MODELS[kind]
        text = config.text_config.with_defaults(language.config_defaults)
        text = text.updated(tie_word_embeddings=config.tie_word_embeddings or text.tie_word_embeddings)
        layers = config.get("vision_feature_layer", -2)
        layers = [layers] if isinstance(layers, int) else layers
        with self._mark_tower_model(vllm_config, "image"):
            self.vision_tower = ClipVisionTower(config.vision_config, layers)
            self.multi_modal_projector = LlavaProjector(
                config.vision_config.hidden_size * len(layers),
                text.hidden_size,
                config.projector_hidden_act,
                bias=config.multimodal_projector_bias,
            )
        self.drops_first = drops_first(config)
        with self._mark_language_model(vllm_config):
            self.language_model = language(
                vllm_config=vllm_config.with_hf_config(text), prefix=f"{prefix}.language_model".lstrip(".")
            )

    @hookimpl
    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return "<image>" if modality == "image" else None

    @hookimpl
    def get_num_mm_encoder_tokens(self, num_image_tokens: int) -> int:
        return num_image_tokens + self.drops_first

    @hookimpl
    def get_num_mm_connector_tokens(self, num_vision_tokens: int) -> int:
        return num_vision_tokens - self.drops_first

    @hookimpl
    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """`pixel_values` [images, channels, size, size]: one [tokens, hidden] tensor per image.

        The strategy "default" leaves the first token of each image out: CLIP's class token.
        """
        features = self.vision_tower(kwargs["pixel_values"])
        if self.drops_first:
            features = features[:, 1:]
        return list(self.multi_modal_projector(features).unbind())

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(
            self,
            weights,
            packed=self.packed_modules_mapping,
            prefixes=CHECKPOINT_PREFIXES,
            skip=[f"vision_tower.{pattern}" for pattern in self.vision_tower.unread()]
            + [f"vision_model.{pattern}" for pattern in self.vision_tower.unread()]
            + ["vision_model.embeddings.position_ids"],
        )

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink."""
        text = LlamaForCausalLM.tiny_config()
        del text["architectures"]
        return {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "image_token_index": 122,
            "text_config": text,
            "vision_config": {
                "model_type": "clip_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 16,
                "patch_size": 4,
            },
        }
