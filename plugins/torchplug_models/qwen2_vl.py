"""Qwen2-VL: Qwen2 that reads images and videos of any size, with positions in time, height and width.

Source: Wang et al., Qwen2-VL, 2024, section 2.1; config and weight names as in transformers'
Qwen2VLForConditionalGeneration, in the order of the published checkpoints (`visual`, `model`) and in that of
transformers 5 (`model.visual`, `model.language_model`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torchplug import CheckpointError, ContractError, Problem, VllmConfig, hookimpl
from torchplug.interfaces import MultiModalFeatureSpec, SupportsMRoPE, SupportsMultiModal
from torchplug.layers import GridSpan, Linear, get_act_fn, load_weights, mrope_positions, pack_sequences
from torchplug.multimodal import MULTIMODAL_REGISTRY

from torchplug_models.llama import LlamaForCausalLM
from torchplug_models.qwen2 import Qwen2ForCausalLM
from torchplug_models.qwen_processor import Qwen2VLProcessor
from torchplug_models.qwen_vision import (
    Grid,
    VisionAttention,
    VisionBlock,
    VisionPatchEmbed,
    frame_lengths,
    grids_of,
    num_tokens_of,
    patch_positions,
    vision_rotary,
)

CHECKPOINT_PREFIXES = {
    "model.visual.": "visual.",
    "model.language_model.": "language_model.model.",
    "model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
"""Both orders in which checkpoints hold the parts, and what the parts are called here."""


class VisionMLP(nn.Module):
    def __init__(self, embed_dim: int, intermediate_size: int, act: str) -> None:
        super().__init__()
        self.fc1 = Linear(embed_dim, intermediate_size, bias=True)
        self.act = get_act_fn(act)
        self.fc2 = Linear(intermediate_size, embed_dim, bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(hidden_states)))


class PatchMerger(nn.Module):
    """Neighbouring patches side by side, through an MLP to one token of the language model."""

    def __init__(self, norm: nn.Module, embed_dim: int, merge_size: int, hidden_size: int) -> None:
        super().__init__()
        self.width = embed_dim * merge_size**2
        self.ln_q = norm
        self.mlp = nn.Sequential(
            Linear(self.width, self.width, bias=True), nn.GELU(), Linear(self.width, hidden_size, bias=True)
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.mlp(self.ln_q(hidden_states).view(-1, self.width))


class Qwen2VisionTransformer(nn.Module):
    """The tower: every frame attends to itself."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.embed_dim, config.num_heads
        self.merge_size = config.spatial_merge_size
        self.patch_embed = VisionPatchEmbed(config, width, bias=False)
        self.rotary_pos_emb = vision_rotary(config, width // heads)
        self.blocks = nn.ModuleList(
            VisionBlock(
                nn.LayerNorm(width, eps=1e-6),
                nn.LayerNorm(width, eps=1e-6),
                VisionAttention(width, heads),
                VisionMLP(width, int(width * config.mlp_ratio), config.hidden_act),
            )
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(nn.LayerNorm(width, eps=1e-6), width, self.merge_size, config.hidden_size)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[patches, patch] of all items, one after another -> [tokens, hidden of the language model]."""
        hidden_states = self.patch_embed(patches)
        device = hidden_states.device
        rotation = self.rotary_pos_emb(patch_positions(grids, self.merge_size).to(device), hidden_states.dtype)
        frames = pack_sequences(frame_lengths(grids), device)
        for block in self.blocks:
            hidden_states = block(hidden_states, rotation, frames)
        return self.merger(hidden_states)


@MULTIMODAL_REGISTRY.register_processor(Qwen2VLProcessor)
class Qwen2VLForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsMRoPE):
    """Qwen2-VL with its language-model head. A later family replaces `tower` and `language`."""

    tower: ClassVar[type[nn.Module]] = Qwen2VisionTransformer
    language: ClassVar[type[LlamaForCausalLM]] = Qwen2ForCausalLM
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = LlamaForCausalLM.packed_modules_mapping
    config_defaults: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "hidden_size": 3584,
            "hidden_act": "quick_gelu",
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.merge_size = self.config.vision_config.spatial_merge_size
        with self._mark_tower_model(vllm_config, {"image", "video"}):
            self.visual = self.tower(self.config.vision_config)
        with self._mark_language_model(vllm_config):
            self.language_model = self.language(
                vllm_config=vllm_config.with_hf_config(self._text_config(vllm_config)),
                prefix=f"{prefix}.language_model".lstrip("."),
            )

    def _text_config(self, vllm_config: VllmConfig) -> Any:
        """The language model's own config: nested, or beside `vision_config` as in the first checkpoints."""
        text = vllm_config.model_config.hf_text_config.with_defaults(self.language.config_defaults)
        rope = text.get("rope_scaling") or text.get("rope_parameters")
        if rope is None or rope.get("mrope_section") is None:
            says = "is missing, so positions in time, height and width have no dimensions to turn"
            fix = "correct the file: take the value that the model's authors published"
            raise CheckpointError("checkpoint config", Problem("rope_parameters.mrope_section", says, fix))
        return text.updated(tie_word_embeddings=self.config.tie_word_embeddings or text.tie_word_embeddings)

    # -- class phase ---------------------------------------------------------------------------------------------

    @hookimpl
    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        pads = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
        return f"<|vision_start|>{pads[modality]}<|vision_end|>" if modality in pads else None

    # -- load phase ----------------------------------------------------------------------------------------------

    @hookimpl
    def get_num_mm_encoder_tokens(self, num_image_tokens: int) -> int:
        return num_image_tokens * self.merge_size**2

    @hookimpl
    def get_num_mm_connector_tokens(self, num_vision_tokens: int) -> int:
        return num_vision_tokens // self.merge_size**2

    # -- request phase -------------------------------------------------------------------------------------------

    @hookimpl
    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """An item's grid of tokens from where the text has counted to; see `torchplug.layers.mrope_positions`."""
        spans = [span for feature in mm_features for span in self.grid_spans(feature)]
        return mrope_positions(len(input_tokens), spans)

    def grid_spans(self, feature: MultiModalFeatureSpec) -> list[GridSpan]:
        """The grids of tokens that one item puts into the prompt."""
        grid = self.token_grid(feature)
        return [GridSpan(feature.mm_position.offset, grid, self.time_step(feature))]

    def token_grid(self, feature: MultiModalFeatureSpec) -> Grid:
        """The item's grid, counted in tokens.

        Raises ContractError where it has another number of tokens than its place in the prompt.
        """
        assert feature.data is not None
        name = "image_grid_thw" if feature.modality == "image" else "video_grid_thw"
        frames, rows, columns = (int(size) for size in feature.data[name])
        tokens = num_tokens_of((frames, rows, columns), self.merge_size)
        if tokens != feature.mm_position.num_embeds:
            says = f"{[frames, rows, columns]} makes {tokens} tokens, its place has {feature.mm_position.num_embeds}"
            where = f"{name} of the {feature.modality} at token {feature.mm_position.offset}"
            raise ContractError("M-RoPE positions", Problem(where, says, "take both from the same processor"))
        return frames, rows // self.merge_size, columns // self.merge_size

    def time_step(self, feature: MultiModalFeatureSpec) -> float:
        """What the time position grows by from frame to frame."""
        return 1.0

    # -- step phase ----------------------------------------------------------------------------------------------

    @hookimpl
    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """`pixel_values` [patches, patch] and `image_grid_thw` int64 [images, 3], `pixel_values_videos` and
        `video_grid_thw`: one [tokens, hidden] tensor per item; where both come, in the order of the keywords."""
        names = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
        embeddings: list[Tensor] = []
        for name in kwargs:
            if name in names:
                grids = grids_of(kwargs[names[name]])
                lengths = [num_tokens_of(grid, self.merge_size) for grid in grids]
                embeddings += self.visual(kwargs[name], grids).split(lengths)
        return embeddings

    # -- the conventions of every model --------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """positions: int64 [3, n], or [n] for text alone."""
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(self, weights, packed=self.packed_modules_mapping, prefixes=CHECKPOINT_PREFIXES)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink."""
        text = cls.language.tiny_config() | {"model_type": "qwen2_vl_text", "use_sliding_window": False}
        del text["architectures"]
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        return {
            "architectures": ["Qwen2VLForConditionalGeneration"],
            "model_type": "qwen2_vl",
            "text_config": text | {"rope_parameters": rope},
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": text["hidden_size"],
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            "vision_start_token_id": 120,
            "vision_end_token_id": 121,
            "image_token_id": 122,
            "video_token_id": 123,
        }
