"""What model plugins are built from. Every public name is importable from here; importing this package imports
torch."""

from torchplug.layers.activation import ActAndMul, SiluAndMul, get_act_and_mul, get_act_fn
from torchplug.layers.attention import Attention, KVCacheSpec, allocate_kv_cache
from torchplug.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from torchplug.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from torchplug.layers.mrope import MRotaryEmbedding, axial_rotary, mrope_rows
from torchplug.layers.mrope_positions import GridSpan, mrope_positions
from torchplug.layers.multimodal import _merge_multimodal_embeddings as merge_multimodal_embeddings
from torchplug.layers.norm import RMSNorm
from torchplug.layers.packed_attention import PackedSequences, attend_packed, pack_sequences
from torchplug.layers.patch_embed import PatchEmbed, image_patches
from torchplug.layers.recurrent import RecurrentLayer
from torchplug.layers.rope_scaling import rope_from_config
from torchplug.layers.rotary import RotaryEmbedding, Rotation, apply_rotary
from torchplug.layers.weights import WeightsMismatch, load_weights
from torchplug.layers.window import layer_window

__all__ = [
    "ActAndMul",
    "Attention",
    "ColumnParallelLinear",
    "GridSpan",
    "KVCacheSpec",
    "Linear",
    "MRotaryEmbedding",
    "MergedColumnParallelLinear",
    "PackedSequences",
    "ParallelLMHead",
    "PatchEmbed",
    "QKVParallelLinear",
    "RMSNorm",
    "RecurrentLayer",
    "RotaryEmbedding",
    "Rotation",
    "RowParallelLinear",
    "SiluAndMul",
    "VocabParallelEmbedding",
    "WeightsMismatch",
    "allocate_kv_cache",
    "apply_rotary",
    "attend_packed",
    "axial_rotary",
    "get_act_and_mul",
    "get_act_fn",
    "image_patches",
    "layer_window",
    "load_weights",
    "merge_multimodal_embeddings",
    "mrope_positions",
    "mrope_rows",
    "pack_sequences",
    "rope_from_config",
]
