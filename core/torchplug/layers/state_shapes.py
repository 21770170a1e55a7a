"""Shapes and dtypes of recurrent states: the one place from which layers and class-phase hooks take them.

A class answers `get_mamba_state_shape_from_config` before any layer exists, and the layer answers for itself with
`state_shapes()`; both call the same function here, so that they cannot disagree. Shapes are those of one
tensor-parallel rank. With speculative decoding a convolution keeps `num_spec` more rows, so that rejected drafts can be
rolled back; the first conv_kernel - 1 rows are the state, the others are the drafts'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchplug.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from torchplug.config import VllmConfig

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}


@dataclass(frozen=True, slots=True)
class StateSettings:
    """What a run decides about states, whatever the architecture.

    Attributes:
        conv_dtype: Of convolution states: `cache_config.mamba_cache_dtype`, "auto" for the model dtype.
        ssm_dtype: Of state-space states: `cache_config.mamba_ssm_cache_dtype`; "auto" for what `mamba_cache_dtype`
            names, and float32, in which the reference implementations scan, where that is "auto" too.
        tp_size: Tensor-parallel ranks.
        num_spec: Most draft tokens in a step; 0 without speculative decoding.
    """

    conv_dtype: torch.dtype = torch.float32
    ssm_dtype: torch.dtype = torch.float32
    tp_size: int = 1
    num_spec: int = 0

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> StateSettings:
        """The settings of a configuration. Raises CheckpointError for a dtype name that states cannot have."""
        cache = vllm_config.cache_config
        conv = _dtype("mamba_cache_dtype", cache.mamba_cache_dtype)
        ssm = _dtype("mamba_ssm_cache_dtype", cache.mamba_ssm_cache_dtype)
        return cls(
            conv_dtype=conv or vllm_config.model_config.dtype,
            ssm_dtype=ssm or conv or torch.float32,
            tp_size=vllm_config.parallel_config.tensor_parallel_size,
            num_spec=getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0,
        )

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of a layer with a convolution state and a state-space state."""
        return self.conv_dtype, self.ssm_dtype


def mamba1_state_shapes(
    settings: StateSettings, *, intermediate_size: int, state_size: int, conv_kernel: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """(convolution, state space) of one Mamba-1 layer: [conv_kernel - 1, intermediate / tp] and [intermediate / tp,
    state].

    There are no rows for drafts: Mamba-1 has no roll-back. Raises CheckpointError where the ranks cannot share the
    channels evenly.
    """
    channels = _share(intermediate_size, settings.tp_size, "intermediate_size")
    return (conv_kernel - 1, channels), (channels, state_size)


def mamba2_state_shapes(
    settings: StateSettings,
    *,
    intermediate_size: int,
    num_heads: int,
    head_dim: int,
    state_size: int,
    n_groups: int,
    conv_kernel: int,
) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """(convolution, state space) of one Mamba-2 layer: [conv_kernel - 1 + num_spec, intermediate / tp + 2 * groups *
    state] and [heads / tp, head_dim, state].

    A rank holds the groups that its heads read: n_groups / tp of them, or one, which tp / n_groups ranks hold alike.
    Raises CheckpointError where neither number divides the other, or where heads cannot be shared evenly.
    """
    tp_size = settings.tp_size
    heads = _share(num_heads, tp_size, "num_heads")
    if num_heads % n_groups:
        raise _refused(
            "n_groups", f"{num_heads} heads cannot share {n_groups} groups evenly", "choose a divisor of num_heads"
        )
    if n_groups % tp_size and tp_size % n_groups:
        raise _refused(
            "n_groups",
            f"{n_groups} groups cannot be spread over {tp_size} ranks: a rank's heads would read parts of groups",
            "choose a tensor-parallel size that divides n_groups or is a multiple of it",
        )
    groups = max(1, n_groups // tp_size)
    channels = _share(intermediate_size, tp_size, "intermediate_size") + 2 * groups * state_size
    return (conv_kernel - 1 + settings.num_spec, channels), (heads, head_dim, state_size)


def short_conv_state_shapes(settings: StateSettings, *, hidden_size: int, conv_kernel: int) -> tuple[tuple[int, int]]:
    """The one state of a short convolution: [conv_kernel - 1 + num_spec, hidden / tp]. Raises CheckpointError where the
    ranks cannot share the channels evenly."""
    return ((conv_kernel - 1 + settings.num_spec, _share(hidden_size, settings.tp_size, "hidden_size")),)


def _share(size: int, tp_size: int, name: str) -> int:
    if size % tp_size:
        raise _refused(
            name,
            f"{size} cannot be shared evenly by {tp_size} ranks",
            "choose a tensor-parallel size that divides it",
        )
    return size // tp_size


def _dtype(setting: str, name: str) -> torch.dtype | None:
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise _refused(
            f"cache_config.{setting}",
            f"{name!r} is not one of auto, {', '.join(sorted(_DTYPES))}",
            "choose one of these",
        )
    return _DTYPES[name]


def _refused(where: str, says: str, fix: str) -> CheckpointError:
    return CheckpointError("recurrent state", Problem(where, says, fix))
