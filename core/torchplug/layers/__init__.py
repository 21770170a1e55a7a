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
from torchplug.layers.moe import FusedMoE
from torchplug.layers.moe_model import FusedMoEModel
from torchplug.layers.norm import RMSNorm
from torchplug.layers.placement import ExpertPlacement
from torchplug.layers.recurrent import RecurrentLayer
from torchplug.layers.rope_scaling import rope_from_config, softmax_scaling
from torchplug.layers.rotary import RotaryEmbedding, Rotation, apply_rotary
from torchplug.layers.routing import GroupScore, TopKRouter
from torchplug.layers.weights import CheckpointPart, WeightsMismatch, load_weights
from torchplug.layers.window import layer_window

__all__ = [
    "ActAndMul",
    "Attention",
    "CheckpointPart",
    "ColumnParallelLinear",
    "ExpertPlacement",
    "FusedMoE",
    "FusedMoEModel",
    "GroupScore",
    "KVCacheSpec",
    "Linear",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "RecurrentLayer",
    "RotaryEmbedding",
    "Rotation",
    "RowParallelLinear",
    "SiluAndMul",
    "TopKRouter",
    "VocabParallelEmbedding",
    "WeightsMismatch",
    "allocate_kv_cache",
    "apply_rotary",
    "get_act_and_mul",
    "get_act_fn",
    "layer_window",
    "load_weights",
    "rope_from_config",
    "softmax_scaling",
]
