"""Qwen3-VL: Qwen3 that reads images and videos, with features of several depths of the tower (DeepStack).

The tower gives a token one row for the prompt and one more for each of the language model's first layers, to whose
results they are added. Here these rows lie side by side, [tokens, (1 + levels) * hidden]: `embed_multimodal` returns
them, `embed_input_ids` gives wide embeddings (zeros beside text) where there are items, and `forward` takes both widths
in `inputs_embeds`. Nothing is kept between calls. Source: Qwen3-VL Technical Report, 2025, section 2; Meng et al.,
DeepStack, 2024; config and weight names as in transformers' Qwen3VLForConditionalGeneration.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchplug import VllmConfig, hookimpl
from torchplug.interfaces import MultiModalEmbeddings, MultiModalFeatureSpec
from torchplug.layers import GridSpan, Linear, get_act_fn, merge_multimodal_embeddings, pack_sequences
from torchplug.multimodal import MULTIMODAL_REGISTRY

from torchplug_models.llama import LlamaForCausalLM, LlamaModel
from torchplug_models.qwen2_vl import Qwen2VLForConditionalGeneration
from torchplug_models.qwen3 import Qwen3ForCausalLM
from torchplug_models.qwen_processor import Qwen3VLProcessor
from torchplug_models.qwen_vision import (
    Grid,
    VisionAttention,
    VisionBlock,
    VisionPatchEmbed,
    frame_lengths,
    patch_positions,
    vision_rotary,
)


class VisionMLP(nn.Module):
    def __init__(self, width: int, intermediate_size: int, act: str) -> None:
        super().__init__()
        self.linear_fc1 = Linear(width, intermediate_size, bias=True)
        self.act_fn = get_act_fn(act)
        self.linear_fc2 = Linear(intermediate_size, width, bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.linear_fc2(self.act_fn(self.linear_fc1(hidden_states)))


class PatchMerger(nn.Module):
    """Neighbouring patches side by side, through an MLP to one token; the norm is of patches, or of what is merged."""

    def __init__(self, config: Any, *, norm_after_merging: bool) -> None:
        super().__init__()
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.norm_after_merging = norm_after_merging
        self.norm = nn.LayerNorm(self.width if norm_after_merging else config.hidden_size, eps=1e-6)
        self.linear_fc1 = Linear(self.width, self.width, bias=True)
        self.act_fn = nn.GELU()
        self.linear_fc2 = Linear(self.width, config.out_hidden_size, bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.norm_after_merging:
            hidden_states = self.norm(hidden_states.view(-1, self.width))
        else:
            hidden_states = self.norm(hidden_states).view(-1, self.width)
        return self.linear_fc2(self.act_fn(self.linear_fc1(hidden_states)))


class Qwen3VisionTransformer(nn.Module):
    """The tower, with a learned table of positions that is stretched over each image."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.merge_size = config.spatial_merge_size
        self.table_side = int(config.num_position_embeddings**0.5)
        self.deepstack_layers = tuple(config.deepstack_visual_indexes)
        self.patch_embed = VisionPatchEmbed(config, width, bias=True)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, width)
        self.rotary_pos_emb = vision_rotary(config, width // heads)
        self.blocks = nn.ModuleList(
            VisionBlock(
                nn.LayerNorm(width, eps=1e-6),
                nn.LayerNorm(width, eps=1e-6),
                VisionAttention(width, heads),
                VisionMLP(width, config.intermediate_size, config.hidden_act),
            )
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(config, norm_after_merging=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, norm_after_merging=True) for _ in self.deepstack_layers
        )

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[patches, patch] of all items, one after another -> [tokens, (1 + levels) * hidden of the language model]."""
        hidden_states = self.patch_embed(patches)
        device = hidden_states.device
        positions = patch_positions(grids, self.merge_size)
        sizes = torch.tensor([grid[1:] for grid in grids])
        sizes = sizes.repeat_interleave(torch.tensor([frames * rows * columns for frames, rows, columns in grids]), 0)
        places, weights = bilinear_places(positions, sizes.T, self.table_side)
        rows = self.pos_embed(places.to(device)) * weights.to(device, hidden_states.dtype)[..., None]
        hidden_states = hidden_states + rows.sum(0)
        rotation = self.rotary_pos_emb(positions.to(device), hidden_states.dtype)
        frames = pack_sequences(frame_lengths(grids), device)
        levels: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, rotation, frames)
            if index in self.deepstack_layers:
                levels.append(self.deepstack_merger_list[len(levels)](hidden_states))
        return torch.cat((self.merger(hidden_states), *levels), dim=-1)


def bilinear_places(positions: Tensor, sizes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Where in a square table of `side` rows each patch lies, when the table is stretched corner to corner over its
    image.

    Args:
        positions: int64 [2, patches], row and column of each patch.
        sizes: int64 [2, patches], rows and columns of the image that it belongs to.
        side: Rows of the table, and columns.

    Returns (entries int64 [4, patches] of the table, their weights float32 [4, patches]).
    """
    exact = positions.float() * (side - 1) / (sizes - 1).clamp(min=1)
    low = exact.floor().long().clamp(max=side - 1)
    high = (low + 1).clamp(max=side - 1)
    part = exact - low
    corners, weights = [], []
    for row, row_weight in ((low[0], 1 - part[0]), (high[0], part[0])):
        for column, column_weight in ((low[1], 1 - part[1]), (high[1], part[1])):
            corners.append(row * side + column)
            weights.append(row_weight * column_weight)
    return torch.stack(corners), torch.stack(weights)


class DeepstackModel(LlamaModel):
    """The decoder stack, to whose first layers' results further features of the images are added."""

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        """hidden_states: [n, hidden], or [n, (1 + levels) * hidden]."""
        hidden_states, *levels = hidden_states.split(self.embed_tokens.embedding_dim, dim=-1)
        rotation = self.rotary_emb(positions, hidden_states.dtype)
        for index, layer in enumerate(self.layers):
            hidden_states = layer(hidden_states, rotation)
            if index < len(levels):
                hidden_states = hidden_states + levels[index]
        return self.norm(hidden_states)


class Qwen3VLTextForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with the stack above."""

    stack: ClassVar[type[LlamaModel]] = DeepstackModel


@MULTIMODAL_REGISTRY.register_processor(Qwen3VLProcessor)
class Qwen3VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Qwen3-VL with its language-model head."""

    tower: ClassVar[type[nn.Module]] = Qwen3VisionTransformer
    language: ClassVar[type[LlamaForCausalLM]] = Qwen3VLTextForCausalLM
    config_defaults: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 3584,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    }

    def _text_config(self, vllm_config: VllmConfig) -> Any:
        """Rows of positions take turns over the pairs of a head, whether or not the file says so."""
        text = super()._text_config(vllm_config)
        key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
        rope = {"mrope_interleaved": True} | getattr(text, key).to_dict()
        return text.updated(**{key: rope})

    def grid_spans(self, feature: MultiModalFeatureSpec) -> list[GridSpan]:
        """Each frame of a video stands on its own, after the text that tells its time."""
        frames, rows, columns = self.token_grid(feature)
        if feature.modality == "image":
            return [GridSpan(feature.mm_position.offset, (frames, rows, columns))]
        place = feature.mm_position
        tokens = torch.arange(place.length) if place.is_embed is None else place.is_embed.nonzero().squeeze(1)
        starts = tokens[:: rows * columns].tolist()
        return [GridSpan(place.offset + start, (1, rows, columns)) for start in starts]

    @hookimpl
    def embed_input_ids(
        self,
        input_ids: Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: Tensor | None = None,
        handle_oov_mm_token: bool = False,
    ) -> Tensor:
        """[n, hidden], or with items [n, (1 + levels) * hidden]."""
        if multimodal_embeddings is None or len(multimodal_embeddings) == 0 or is_multimodal is None:
            return super().embed_input_ids(
                input_ids,
                multimodal_embeddings,
                is_multimodal=is_multimodal,
                handle_oov_mm_token=handle_oov_mm_token,
            )
        embeds = self._embed_text_input_ids(
            input_ids,
            self.language_model.embed_input_ids,
            is_multimodal=is_multimodal,
            handle_oov_mm_token=handle_oov_mm_token,
        )
        levels = len(self.config.vision_config.deepstack_visual_indexes)
        wide = F.pad(embeds, (0, levels * embeds.shape[1]))
        return merge_multimodal_embeddings(wide, multimodal_embeddings, is_multimodal)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A small config whose tower hands features of two depths to two layers."""
        config = super().tiny_config()
        rope = config["text_config"]["rope_parameters"] | {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}
        config["text_config"] |= {"model_type": "qwen3_vl_text", "rope_parameters": rope}
        vision = {
            "depth": 3,
            "hidden_size": 32,
            "out_hidden_size": config["text_config"]["hidden_size"],
            "intermediate_size": 48,
            "num_heads": 4,
            "patch_size": 4,
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 1],
        }
        named = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
        return config | named | {"vision_config": vision}
