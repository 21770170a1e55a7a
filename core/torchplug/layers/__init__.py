"""What model plugins are built from. Every public name is importable from here; importing this package imports
torch."""

from torchplug.forward_context import ForwardContext, get_forward_context
from torchplug.layers.activation import ActAndMul, SiluAndMul, get_act_and_mul, get_act_fn
from torchplug.layers.attention import Attention, KVCacheSpec, allocate_kv_cache
from torchplug.layers.conv import CausalConv1d
from torchplug.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from torchplug.layers.gated_norm import GatedRMSNorm
from torchplug.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from torchplug.layers.mamba import MambaMixer
from torchplug.layers.mamba2 import MambaMixer2
from torchplug.layers.moe import FusedMoE
from torchplug.layers.moe_model import FusedMoEModel
from torchplug.layers.mrope import MRotaryEmbedding, axial_rotary, mrope_rows
from torchplug.layers.mrope_positions import GridSpan, mrope_positions
from torchplug.layers.multimodal import _merge_multimodal_embeddings as merge_multimodal_embeddings
from torchplug.layers.norm import RMSNorm
from torchplug.layers.packed_attention import PackedSequences, attend_packed, pack_sequences
from torchplug.layers.patch_embed import PatchEmbed, image_patches
from torchplug.layers.placement import ExpertPlacement
from torchplug.layers.recurrent import RecurrentLayer
from torchplug.layers.rope_scaling import rope_from_config, softmax_scaling
from torchplug.layers.rotary import RotaryEmbedding, Rotation, apply_rotary
from torchplug.layers.routing import GroupScore, TopKRouter
from torchplug.layers.short_conv import ShortConv
from torchplug.layers.state_copy import get_conv_copy_spec, get_temporal_copy_spec
from torchplug.layers.state_shapes import (
    StateSettings,
    mamba1_state_shapes,
    mamba2_state_shapes,
    short_conv_state_shapes,
)
from torchplug.layers.weights import CheckpointPart, WeightsMismatch, load_weights
from torchplug.layers.window import layer_window

__all__ = [
    "ActAndMul",
    "Attention",
    "CausalConv1d",
    "CheckpointPart",
    "ColumnParallelLinear",
    "ExpertPlacement",
    "ForwardContext",
    "FusedMoE",
    "FusedMoEModel",
    "GatedRMSNorm",
    "GridSpan",
    "GroupScore",
    "KVCacheSpec",
    "Linear",
    "MRotaryEmbedding",
    "MambaMixer",
    "MambaMixer2",
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
    "ShortConv",
    "SiluAndMul",
    "StateSettings",
    "TopKRouter",
    "VocabParallelEmbedding",
    "WeightsMismatch",
    "allocate_kv_cache",
    "apply_rotary",
    "attend_packed",
    "axial_rotary",
    "get_act_and_mul",
    "get_act_fn",
    "get_conv_copy_spec",
    "get_forward_context",
    "get_temporal_copy_spec",
    "image_patches",
    "layer_window",
    "load_weights",
    "mamba1_state_shapes",
    "mamba2_state_shapes",
    "merge_multimodal_embeddings",
    "mrope_positions",
    "mrope_rows",
    "pack_sequences",
    "rope_from_config",
    "short_conv_state_shapes",
    "softmax_scaling",
]
