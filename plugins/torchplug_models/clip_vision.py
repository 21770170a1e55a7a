"""CLIP's and SigLIP's vision towers, as far as a language model reads them: features of chosen layers, no pooling.

Sources: Radford et al., CLIP, 2021, section 2.4; Zhai et al., SigLIP, 2023. Weight names as in transformers'
CLIPVisionModel and SiglipVisionModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchplug import CheckpointError, Problem
from torchplug.layers import (
    Linear,
    PackedSequences,
    PatchEmbed,
    QKVParallelLinear,
    attend_packed,
    get_act_fn,
    image_patches,
    pack_sequences,
)

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"


def is_siglip(config: Any) -> bool:
    """Which of the two a `vision_config` is; CLIP where it does not say.

    Raises CheckpointError where it is neither.
    """
    kind = config.get("model_type", CLIP)
    if kind not in (CLIP, SIGLIP):
        fix = f"use a checkpoint whose tower is {CLIP} or {SIGLIP}"
        raise CheckpointError("checkpoint config", Problem("vision_config.model_type", f"is {kind!r}", fix))
    return bool(kind == SIGLIP)


class VisionEmbeddings(nn.Module):
    """Patches with learned positions; in CLIP after a class token."""

    def __init__(self, config: Any, *, class_token: bool) -> None:
        super().__init__()
        width, self.patch_size = config.hidden_size, config.patch_size
        self.image_size = config.image_size
        self.class_embedding = nn.Parameter(torch.empty(width)) if class_token else None
        shape = (config.num_channels, self.patch_size, self.patch_size)
        self.patch_embedding = PatchEmbed(shape, width, bias=not class_token)
        self.position_embedding = nn.Embedding((self.image_size // self.patch_size) ** 2 + class_token, width)

    def forward(self, images: Tensor) -> Tensor:
        """[images, channels, size, size] -> [images, tokens, hidden]."""
        size = self.image_size
        if tuple(images.shape[2:]) != (size, size):
            raise ValueError(f"images are {list(images.shape[2:])}, the tower was trained for {[size, size]}")
        patches = image_patches(images.to(self.patch_embedding.weight.dtype), self.patch_size)
        tokens = self.patch_embedding(patches)
        if self.class_embedding is not None:
            tokens = torch.cat((self.class_embedding.expand(len(images), 1, -1), tokens), dim=1)
        return tokens + self.position_embedding.weight


class VisionSelfAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_size = width // config.num_attention_heads
        self.qkv_proj = QKVParallelLinear(width, self.head_size, config.num_attention_heads, bias=True)
        self.out_proj = Linear(width, width, bias=True)

    def forward(self, hidden_states: Tensor, sequences: PackedSequences) -> Tensor:
        query, key, value = self.qkv_proj(hidden_states).chunk(3, dim=-1)
        return self.out_proj(attend_packed(query, key, value, sequences, self.head_size, self.head_size**-0.5))


class VisionMLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, bias=True)
        self.act = get_act_fn(config.hidden_act)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, bias=True)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(hidden_states)))


class VisionEncoderLayer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = VisionSelfAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config)

    def forward(self, hidden_states: Tensor, sequences: PackedSequences) -> Tensor:
        hidden_states = hidden_states + self.self_attn(self.layer_norm1(hidden_states), sequences)
        return hidden_states + self.mlp(self.layer_norm2(hidden_states))


class VisionEncoder(nn.Module):
    def __init__(self, config: Any, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionEncoderLayer(config) for _ in range(num_layers))


class ClipVisionTower(nn.Module):
    """Embeddings and as many layers as the features that are read need; what comes after them is not built.

    Args:
        config: `vision_config`; its `model_type` says which of the two it is, CLIP where it does not.
        feature_layers: Indices into the sequence of hidden states, of which the embeddings are the first; negative
            ones count from the end. Several are laid side by side.
    """

    def __init__(self, config: Any, feature_layers: Sequence[int]) -> None:
        super().__init__()
        self.class_token = not is_siglip(config)
        self.num_checkpoint_layers = config.num_hidden_layers
        states = config.num_hidden_layers + 1
        if not feature_layers or not all(-states <= layer < states for layer in feature_layers):
            says = f"is {list(feature_layers)}, the tower has hidden states {-states} to {states - 1}"
            fix = "correct the file: take the value that the model's authors published"
            raise CheckpointError("checkpoint config", Problem("vision_feature_layer", says, fix))
        self.feature_layers = tuple(layer % states for layer in feature_layers)
        self.embeddings = VisionEmbeddings(config, class_token=self.class_token)
        if self.class_token:
            self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = VisionEncoder(config, max(self.feature_layers))

    def forward(self, images: Tensor) -> Tensor:
        """[images, channels, size, size] -> [images, tokens, features * hidden], the class token first in CLIP."""
        hidden_states = self.embeddings(images)
        if self.class_token:
            hidden_states = self.pre_layrnorm(hidden_states)
        count, tokens, width = hidden_states.shape
        sequences = pack_sequences([tokens] * count, hidden_states.device)
        states = [hidden_states.reshape(-1, width)]
        for layer in self.encoder.layers:
            states.append(layer(states[-1], sequences))
        features = torch.cat([states[layer] for layer in self.feature_layers], dim=-1)
        return features.view(count, tokens, -1)

    def unread(self) -> list[str]:
        """Names of checkpoint tensors, as patterns, of what comes after the features that are read."""
        layers = range(len(self.encoder.layers), self.num_checkpoint_layers)
        return [f"encoder.layers.{layer}.*" for layer in layers] + ["post_layernorm.*", "head.*"]
