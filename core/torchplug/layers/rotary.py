"""Rotary position embedding and its context-extending variants, from either spelling of a config.

A model computes the rotation of a step once, `rotation = rotary_emb(positions, dtype)`, and hands it to every layer; a
layer turns all its query and key heads in one call, `apply_rotary(qk, rotation)`. Sources: Su et al., RoFormer, 2021,
section 3.2.2 (the rotation); Chen et al., Position Interpolation, 2023 ("linear"); Peng et al., YaRN, 2023, section 3.1
(NTK-aware: "dynamic") and 3.2 ("yarn"); Llama 3.1's release ("llama3").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchplug.config import HfConfig
from torchplug.errors import CheckpointError, Problem
from torchplug.forward_context import get_forward_context


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of each token of a step, [num_tokens, 1, rotary_dim] each, in the dtype of what they turn.

    `sin` carries the sign of the pair's first member, so that turning is `x * cos + swapped(x) * sin`.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


def apply_rotary(x: Tensor, rotation: Rotation, head_size: int) -> Tensor:
    """Turn every head of every token; the dimensions past rotary_dim of a head stay as they are.

    Args:
        x: [num_tokens, heads * head_size], query heads, key heads, or both side by side. Not modified.
        rotation: What `RotaryEmbedding` gave for these tokens.
        head_size: Size of one head.

    Returns [num_tokens, heads * head_size], contiguous.
    """
    num_tokens, width = x.shape
    rotary_dim = rotation.cos.shape[-1]
    heads = x.view(num_tokens, -1, head_size)
    turned = heads if rotary_dim == head_size else heads[..., :rotary_dim]
    if rotation.interleaved:
        swapped = turned.reshape(*turned.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        swapped = turned.roll(rotary_dim // 2, -1)
    result = torch.addcmul(turned * rotation.cos, swapped, rotation.sin)
    if rotary_dim != head_size:
        result = torch.cat((result, heads[..., rotary_dim:]), dim=-1)
    return result.view(num_tokens, width)


class RotaryEmbedding(nn.Module):
    """The rotation for given positions.

    Args:
        inv_freq: float32 [rotary_dim / 2], angle per position of each pair of dimensions.
        attention_scaling: Factor on cos and sin (YaRN's attention temperature; 1 otherwise).
        interleaved: Pairs are neighbours, (0, 1), (2, 3), ... (GPT-J style); otherwise i and i + rotary_dim / 2
            (GPT-NeoX style).

    Angles, cos and sin are computed in float32, then cast, as transformers does. They are computed for the positions of
    each step: a step has few, a table for all positions of a long-context model would cost more to build than a short
    answer saves.
    """

    inv_freq: Tensor
    _signed_scaling: Tensor

    def __init__(self, inv_freq: Tensor, *, attention_scaling: float = 1.0, interleaved: bool = False) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.attention_scaling = attention_scaling
        self.interleaved = interleaved
        # sin's sign for the first member of each pair, which takes minus its partner.
        sign = torch.tensor([-attention_scaling, attention_scaling], dtype=torch.float32)
        self.register_buffer(
            "_signed_scaling",
            sign.repeat(len(inv_freq)) if interleaved else sign.repeat_interleave(len(inv_freq)),
            persistent=False,
        )

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """positions: int64 [num_tokens]; dtype: that of the heads to turn."""
        angles = positions[:, None].float() * self._frequencies(positions)
        angles = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin() * self._signed_scaling
        if self.attention_scaling != 1.0:
            cos = cos * self.attention_scaling
        return Rotation(cos.to(dtype)[:, None], sin.to(dtype)[:, None], self.interleaved)

    def _frequencies(self, positions: Tensor) -> Tensor:
        """float32 [rotary_dim / 2], or [num_tokens, rotary_dim / 2] where they differ between requests."""
        return self.inv_freq

    def extra_repr(self) -> str:
        return f"rotary_dim={2 * len(self.inv_freq)}, interleaved={self.interleaved}"


class DynamicNTKRotaryEmbedding(RotaryEmbedding):
    """Frequencies whose base grows with the length of the sequence, once it is past the trained length.

    A token is turned with the base for the length that its request has after the step that computes it, and keys
    already in the cache keep their
    rotation: this is what transformers' `generate` does for one prompt. So a prompt longer than the trained length
    comes out as there only if one step computes it whole: with this type, and past the trained length only, how a
    prompt is cut into steps changes the result, and a cached prefix is valid only for prompts of the same length.
    `depends_on_length` tells an engine so. Unlike transformers, a request's base depends on its own length, never on
    its neighbours in the batch or on the request before.

    Args:
        theta: Base at and below the trained length.
        factor: How fast the base grows.
        max_positions: The trained length in tokens.
        rotary_dim: Dimensions of a head that are turned.
    """

    depends_on_length = True

    def __init__(
        self, theta: float, factor: float, max_positions: int, rotary_dim: int, *, interleaved: bool = False
    ) -> None:
        super().__init__(_inv_freq(theta, rotary_dim), interleaved=interleaved)
        self.theta = theta
        self.factor = factor
        self.max_positions = max_positions
        self.rotary_dim = rotary_dim
        self.register_buffer(
            "_exponents", torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim, persistent=False
        )

    _exponents: Tensor

    def _frequencies(self, positions: Tensor) -> Tensor:
        context = get_forward_context()
        if context is None:
            lengths = positions.amax(dim=0, keepdim=True) + 1
        elif max(context.seq_lens_host) <= self.max_positions:
            return self.inv_freq
        else:
            new_tokens = context.query_start_loc.diff()
            lengths = context.seq_lens.repeat_interleave(new_tokens)
        growth = self.factor * lengths.clamp(min=self.max_positions).float() / self.max_positions - (self.factor - 1)
        base = self.theta * growth ** (self.rotary_dim / (self.rotary_dim - 2))
        return 1.0 / base[:, None] ** self._exponents


def rope_from_config(
    hf_config: HfConfig, head_dim: int, max_positions: int, *, interleaved: bool = False, theta: float = 10_000.0
) -> RotaryEmbedding:
    """The rotary embedding that a config asks for.

    Args:
        hf_config: Has `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` with "rope_type" or "type"
            (before), or neither. Where a file has both spellings, `rope_scaling` wins, as in transformers.
            `partial_rotary_factor` may stand inside or beside.
        head_dim: Size of one head.
        max_positions: The model's `max_position_embeddings`.
        interleaved: Style of the pairs, which the architecture decides, not the config.
        theta: Base of a config that names none.

    Raises CheckpointError naming the key: an unknown type (the known ones are listed), a key that the type needs, a
    value that is no number or out of range, parameters per layer type.
    """
    spelling = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    found = hf_config.get(spelling)
    values = found.to_dict() if isinstance(found, HfConfig) else {}
    parameters = _Parameters(values, spelling, getattr(hf_config, "_source", "config.json"))
    nested = [key for key, value in values.items() if isinstance(value, Mapping)]
    if nested:
        raise parameters.error(
            nested[0],
            "holds parameters for one layer type",
            "this model class takes one set of rotary parameters for all layers",
        )
    for beside in ("rope_theta", "partial_rotary_factor"):
        if values.get(beside) is None and hf_config.get(beside) is not None:
            values[beside] = hf_config.get(beside)
    if hf_config.get("original_max_position_embeddings") is not None:
        values["original_max_position_embeddings"] = hf_config.get("original_max_position_embeddings")

    kind = values.get("rope_type") or values.get("type") or "default"
    if kind not in _BUILDERS:
        key = "rope_type" if values.get("rope_type") else "type"
        raise parameters.error(key, f"{kind!r} is not a known type", f"one of {', '.join(sorted(_BUILDERS))}")
    base = parameters.number("rope_theta", theta)
    rotary_dim = int(head_dim * parameters.number("partial_rotary_factor", 1.0))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise parameters.error(
            "partial_rotary_factor",
            f"turns {rotary_dim} of {head_dim} dimensions of a head",
            "an even number of dimensions from 2 to the head size",
        )
    return _BUILDERS[kind](parameters, base, rotary_dim, max_positions, interleaved)


class _Parameters:
    """The rotary parameters of one config, read with errors that name the key and the file."""

    def __init__(self, values: dict[str, Any], spelling: str, source: str) -> None:
        self.values = values
        self.spelling = spelling
        self.source = source

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, "is needed by this type and missing", "add it, as the model's authors published it")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.error(
                key, f"expected a number above 0, found {value!r}", "correct it, as the model's authors published it"
            )
        return value

    def error(self, key: str, says: str, fix: str) -> CheckpointError:
        return CheckpointError(f"checkpoint config {self.source}", Problem(f"{self.spelling}.{key}", says, fix))


def _inv_freq(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponents


def _default(p: _Parameters, theta: float, rotary_dim: int, max_positions: int, interleaved: bool) -> RotaryEmbedding:
    return RotaryEmbedding(_inv_freq(theta, rotary_dim), interleaved=interleaved)


def _linear(p: _Parameters, theta: float, rotary_dim: int, max_positions: int, interleaved: bool) -> RotaryEmbedding:
    return RotaryEmbedding(_inv_freq(theta, rotary_dim) / p.number("factor"), interleaved=interleaved)


def _dynamic(p: _Parameters, theta: float, rotary_dim: int, max_positions: int, interleaved: bool) -> RotaryEmbedding:
    return DynamicNTKRotaryEmbedding(theta, p.number("factor"), max_positions, rotary_dim, interleaved=interleaved)


def _llama3(p: _Parameters, theta: float, rotary_dim: int, max_positions: int, interleaved: bool) -> RotaryEmbedding:
    """Slow pairs are stretched by `factor`, fast ones stay, those between are blended by how often they turn in the
    trained length."""
    factor, low, high = p.number("factor"), p.number("low_freq_factor"), p.number("high_freq_factor")
    trained = p.number("original_max_position_embeddings", max_positions)
    if low >= high:
        raise p.error(
            "low_freq_factor",
            f"{low} is not below high_freq_factor {high}",
            "correct it, as the model's authors published it",
        )
    plain = _inv_freq(theta, rotary_dim)
    turns = trained * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return RotaryEmbedding((1 - share) * plain / factor + share * plain, interleaved=interleaved)


def _yarn(p: _Parameters, theta: float, rotary_dim: int, max_positions: int, interleaved: bool) -> RotaryEmbedding:
    """Pairs that turn more than `beta_fast` times in the trained length stay, less than `beta_slow` are stretched, a
    ramp over their index between."""
    trained = p.number("original_max_position_embeddings", max_positions)
    factor = p.number("factor", max_positions / trained)

    def index_of(turns: float) -> float:
        return rotary_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(p.number("beta_fast", 32)), index_of(p.number("beta_slow", 1))
    if p.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    plain = _inv_freq(theta, rotary_dim)
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = plain / factor * stretched + plain * (1 - stretched)
    return RotaryEmbedding(inv_freq, attention_scaling=_yarn_temperature(p, factor), interleaved=interleaved)


def _yarn_temperature(p: _Parameters, factor: float) -> float:
    if p.values.get("attention_factor") is not None:
        return p.number("attention_factor")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.values.get("mscale") and p.values.get("mscale_all_dim"):
        return mscale(p.number("mscale")) / mscale(p.number("mscale_all_dim"))
    return mscale(1.0)


_BUILDERS: Mapping[str, Callable[[_Parameters, float, int, int, bool], RotaryEmbedding]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
