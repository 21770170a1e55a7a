"""Which rotary embedding a config asks for: both spellings, and the ways to stretch a context.

Sources: Chen et al., Position Interpolation, 2023 ("linear"); Peng et al., YaRN, 2023, section 3.1 (NTK-aware, here
"dynamic") and 3.2 ("yarn"); the Llama 3.1 release ("llama3"). Where the config has an `mrope_section`, the positions
have several rows (`mrope`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchplug.config import HfConfig
from torchplug.errors import CheckpointError, Problem
from torchplug.layers.mrope import MRotaryEmbedding, mrope_rows
from torchplug.layers.rotary import DynamicNTKRotaryEmbedding, RotaryEmbedding, inverse_frequencies


def rope_from_config(
    hf_config: HfConfig, head_dim: int, max_positions: int, *, interleaved: bool = False, theta: float = 10_000.0
) -> RotaryEmbedding:
    """The rotary embedding that a config asks for.

    Args:
        hf_config: Has `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` with "rope_type" or "type"
            (before), or neither. Where a file has both spellings, `rope_scaling` wins, as in transformers; what stands
            inside wins over `rope_theta` and `partial_rotary_factor` beside it. With `mrope_section` inside, the result
            is an MRotaryEmbedding.
        head_dim: Size of one head.
        max_positions: The model's `max_position_embeddings`.
        interleaved: Style of the pairs, which the architecture decides, not the config.
        theta: Base of a config that names none.

    Raises CheckpointError naming the key and the file: an unknown type (the known ones are listed), a key that the type
    needs, a value that is no number or out of range, parameters per layer type.
    """
    p = _Parameters(hf_config)
    kind = p.inside.get("rope_type") or p.inside.get("type") or "default"
    if kind == "mrope":  # Qwen2-VL's first files call it so; the section says it, and the frequencies are plain
        kind = "default"
    if not isinstance(kind, str) or kind not in _KINDS:
        raise p.error(p.kind_key, f"{kind!r} is not a known type", f"one of {', '.join(sorted(_KINDS))}")
    base = p.number("rope_theta", theta, above=1)
    rotary_dim = int(head_dim * p.number("partial_rotary_factor", 1.0))
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise p.error(
            "partial_rotary_factor",
            f"turns {rotary_dim} of {head_dim} dimensions of a head",
            "an even number of dimensions from 2 to the head size",
        )
    rotary = _KINDS[kind](p, base, rotary_dim, max_positions, interleaved)
    return rotary if p.inside.get("mrope_section") is None else _by_rows(p, rotary)


def _by_rows(p: _Parameters, rotary: RotaryEmbedding) -> MRotaryEmbedding:
    """The same frequencies, turned by several rows of positions."""
    section, pairs = p.inside["mrope_section"], len(rotary.inv_freq)
    if not isinstance(section, Sequence) or not all(type(size) is int and size >= 0 for size in section):
        raise p.error("mrope_section", f"expected a list of pairs per row, found {section!r}", _CORRECT)
    if len(section) < 2 or sum(section) != pairs:
        says = f"{section} has {sum(section)} pairs in {len(section)} rows, the head turns {pairs}"
        raise p.error("mrope_section", says, f"two rows or more that add up to {pairs}")
    if rotary.depends_on_length:
        raise p.error(p.kind_key, "the dynamic type has no M-RoPE", "use another type")
    rows = mrope_rows(section, interleaved=p.flag("mrope_interleaved", False))
    scaling = rotary.attention_scaling
    return MRotaryEmbedding(rotary.inv_freq, rows, attention_scaling=scaling, interleaved=rotary.interleaved)


def softmax_scaling(hf_config: HfConfig) -> float:
    """What a stretched context adds to the scale of attention scores where a config has `mscale_all_dim`: the square of
    YaRN's temperature for it; 1 otherwise.

    Models that rotate only a part of each head put the temperature here, where it reaches the rest of the head too
    (DeepSeek-V2); `rope_from_config` takes the same amount out of the rotation.

    Raises CheckpointError naming the key and the file where a parameter is missing or no number.
    """
    p = _Parameters(hf_config)
    kind = p.inside.get("rope_type") or p.inside.get("type") or "default"
    if kind == "default" or not p.inside.get("mscale_all_dim"):
        return 1.0
    return _mscale(p.number("factor"), p.number("mscale_all_dim")) ** 2


class _Parameters:
    """The rotary parameters of one config, read with errors that name the key and the file."""

    def __init__(self, hf_config: HfConfig) -> None:
        self.source = getattr(hf_config, "_source", "config.json")
        self.spelling = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
        found = hf_config.get(self.spelling)
        if not isinstance(found, HfConfig | None):
            raise self._error(self.spelling, f"expected a mapping, found {found!r}", _CORRECT)
        self.inside: dict[str, Any] = found.to_dict() if found is not None else {}
        self.kind_key = "rope_type" if self.inside.get("rope_type") else "type"
        for key, value in self.inside.items():
            if isinstance(value, Mapping):
                raise self.error(
                    key, "holds parameters for one layer type", "this model class takes one set for all its layers"
                )
        beside = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
        self.beside = {key: hf_config.get(key) for key in beside if hf_config.get(key) is not None}
        if "original_max_position_embeddings" in self.beside:  # wins over what stands inside, as in transformers
            self.inside.pop("original_max_position_embeddings", None)

    def number(self, key: str, default: float | None = None, *, above: float = 0) -> float:
        value = self.inside.get(key)
        if value is None:
            value = self.beside.get(key, default)
        if value is None:
            raise self.error(key, "is needed by this type and missing", _CORRECT)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            raise self.error(key, f"expected a number above {above}, found {value!r}", _CORRECT)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.inside.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}", _CORRECT)
        return value

    def error(self, key: str, says: str, fix: str) -> CheckpointError:
        is_beside = self.inside.get(key) is None and key in self.beside
        return self._error(key if is_beside else f"{self.spelling}.{key}", says, fix)

    def _error(self, where: str, says: str, fix: str) -> CheckpointError:
        return CheckpointError(f"checkpoint config {self.source}", Problem(where, says, fix))


_CORRECT = "correct the file: take the value that the model's authors published"


def _default(p: _Parameters, theta: float, rotary_dim: int, max_positions: int, interleaved: bool) -> RotaryEmbedding:
    return RotaryEmbedding(inverse_frequencies(theta, rotary_dim), interleaved=interleaved)


def _linear(p: _Parameters, theta: float, rotary_dim: int, max_positions: int, interleaved: bool) -> RotaryEmbedding:
    return RotaryEmbedding(inverse_frequencies(theta, rotary_dim) / p.number("factor"), interleaved=interleaved)


def _dynamic(p: _Parameters, theta: float, rotary_dim: int, max_positions: int, interleaved: bool) -> RotaryEmbedding:
    if rotary_dim == 2:
        raise p.error(p.kind_key, "the dynamic type needs more than 2 dimensions to turn", "use another type")
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
    plain = inverse_frequencies(theta, rotary_dim)
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
    if p.inside.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    plain = inverse_frequencies(theta, rotary_dim)
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inv_freq = plain / factor * stretched + plain * (1 - stretched)
    return RotaryEmbedding(inv_freq, attention_scaling=_yarn_temperature(p, factor), interleaved=interleaved)


def _yarn_temperature(p: _Parameters, factor: float) -> float:
    if p.inside.get("attention_factor") is not None:
        return p.number("attention_factor")
    if p.inside.get("mscale") and p.inside.get("mscale_all_dim"):
        return _mscale(factor, p.number("mscale")) / _mscale(factor, p.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


_KINDS: Mapping[str, Callable[[_Parameters, float, int, int, bool], RotaryEmbedding]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
