"""Tangram: a decoder that reads images as tiles, in rows.

It shows what a vision-language package brings: a tower that is left out where no image may come, a processor of its
own, a placeholder token outside the vocabulary, text tokens inside an item, and M-RoPE positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchplug import VllmConfig, hookimpl
from torchplug.interfaces import MultiModalFeatureSpec, SupportsMRoPE, SupportsMultiModal
from torchplug.layers import (
    Attention,
    GridSpan,
    Linear,
    ParallelLMHead,
    PatchEmbed,
    QKVParallelLinear,
    RMSNorm,
    Rotation,
    VocabParallelEmbedding,
    apply_rotary,
    attend_packed,
    axial_rotary,
    load_weights,
    mrope_positions,
    pack_sequences,
    rope_from_config,
)
from torchplug.multimodal import MULTIMODAL_REGISTRY

from torchplug_vl.processor import TangramProcessor


class TangramTower(nn.Module):
    """Tiles of any number of images: embedded, one round of attention inside each image, projected."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.tower_size
        self.head_size = width // config.tower_heads
        self.tile_embed = PatchEmbed((3, config.tile_size, config.tile_size), width, bias=True)
        self.rotary_emb = axial_rotary(self.head_size)
        self.qkv_proj = QKVParallelLinear(width, self.head_size, config.tower_heads)
        self.norm = RMSNorm(width)
        self.out_proj = Linear(width, config.hidden_size, bias=True)

    def forward(self, tiles: Tensor, grids: list[list[int]]) -> Tensor:
        """tiles: [n, 3 * tile_size ** 2], image after image, row after row -> [n, hidden]."""
        hidden_states = self.tile_embed(tiles.to(self.tile_embed.weight.dtype))
        places = [
            torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(-1, 2) for rows, columns in grids
        ]
        rotation = self.rotary_emb(torch.cat(places).T.to(tiles.device), hidden_states.dtype)
        images = pack_sequences([rows * columns for rows, columns in grids], tiles.device)
        query, key, value = self.qkv_proj(hidden_states).chunk(3, dim=-1)
        query, key = (apply_rotary(x, rotation, self.head_size) for x in (query, key))
        hidden_states = hidden_states + attend_packed(query, key, value, images, self.head_size, self.head_size**-0.5)
        return self.out_proj(self.norm(hidden_states))


class TangramLayer(nn.Module):
    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_attention_heads
        self.head_size = width // heads
        self.norm = RMSNorm(width)
        self.qkv_proj = QKVParallelLinear(width, self.head_size, heads)
        self.attn = Attention(heads, self.head_size, self.head_size**-0.5, prefix=f"{prefix}.attn")
        self.o_proj = Linear(width, width)

    def forward(self, hidden_states: Tensor, rotation: Rotation) -> Tensor:
        query, key, value = self.qkv_proj(self.norm(hidden_states)).chunk(3, dim=-1)
        query, key = (apply_rotary(x, rotation, self.head_size) for x in (query, key))
        return hidden_states + self.o_proj(self.attn(query, key, value))


class TangramDecoder(nn.Module):
    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = rope_from_config(
            config, config.hidden_size // config.num_attention_heads, config.max_position_embeddings
        )
        names = (f"{prefix}.layers.{index}" for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(TangramLayer(config, name) for name in names)
        self.norm = RMSNorm(config.hidden_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        rotation = self.rotary_emb(positions, hidden_states.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states, rotation)
        return self.norm(hidden_states)


@MULTIMODAL_REGISTRY.register_processor(TangramProcessor)
class TangramForConditionalGeneration(nn.Module, SupportsMultiModal, SupportsMRoPE):
    """Tangram with its head. `tile_token_id` lies outside the vocabulary: no text can type it."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    config_defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 512, "max_tiles": 64}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        with self._mark_tower_model(vllm_config, "image"):
            self.tower = TangramTower(config)
        with self._mark_language_model(vllm_config):
            self.decoder = TangramDecoder(config, f"{prefix}.decoder".lstrip("."))
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)

    @hookimpl
    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return "<tile>" if modality == "image" else None

    @hookimpl
    def get_language_model(self) -> TangramDecoder:
        return self.decoder

    @hookimpl
    def get_num_mm_encoder_tokens(self, num_image_tokens: int) -> int:
        """The tower has a token per tile, as the prompt."""
        return num_image_tokens

    @hookimpl
    def get_mrope_input_positions(
        self, input_tokens: list[int], mm_features: list[MultiModalFeatureSpec]
    ) -> tuple[Tensor, int]:
        """`<open>` and `<close>` are text; between them the tiles, with the `<row>` that ends each row, are a grid."""
        spans = []
        for feature in mm_features:
            rows, columns = feature.data["grid"].tolist()
            spans.append(GridSpan(feature.mm_position.offset + 1, (1, rows, columns + 1)))
        return mrope_positions(len(input_tokens), spans)

    @hookimpl
    def embed_multimodal(self, **kwargs: Any) -> list[Tensor]:
        """`tiles` [n, 3 * tile_size ** 2] and `grid` int64 [images, 2]: one [tiles, hidden] tensor per image."""
        grids = kwargs["grid"].tolist()
        return list(self.tower(kwargs["tiles"], grids).split([rows * columns for rows, columns in grids]))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """positions: int64 [3, n], or [n] for text alone."""
        return self.decoder(self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return self.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return load_weights(self, weights, packed=self.packed_modules_mapping)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """A config of this architecture that is small enough to check in a blink."""
        return {
            "architectures": ["TangramForConditionalGeneration"],
            "model_type": "tangram",
            "vocab_size": 64,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "tower_size": 24,
            "tower_heads": 2,
            "tile_size": 8,
            "open_token_id": 60,
            "close_token_id": 61,
            "row_token_id": 62,
            "tile_token_id": 64,
        }
