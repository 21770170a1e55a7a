"""Rotary position embedding: the rotation of a step's tokens, and turning heads by it.

A model computes the rotation of a step once, `rotation = rotary_emb(positions, dtype)`, and hands it to every layer; a
layer turns all its query and key heads in one call, `apply_rotary(qk, rotation, head_size)`. Source: Su et al.,
RoFormer, 2021, section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchplug.forward_context import get_forward_context
from torchplug.layers.cpu import kernels


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
    native = kernels.rotary(x, rotation.cos, rotation.sin, head_size, rotation.interleaved)
    if native is not None:
        return native
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

    depends_on_length: ClassVar[bool] = False
    """Whether a token's rotation depends on more than its position, so that cutting a prompt into steps matters."""

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
        frequencies = self._frequencies(positions)
        native = kernels.rotation(positions, frequencies, dtype, self.attention_scaling, self.interleaved)
        if native is not None:
            return Rotation(*native, self.interleaved)
        return self._rotation(positions[:, None].float() * frequencies, dtype)

    def _rotation(self, angles: Tensor, dtype: torch.dtype) -> Rotation:
        """angles: float32 [num_tokens, rotary_dim / 2]."""
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
    already in the cache keep their rotation: this is what transformers' `generate` does for one prompt. So a prompt
    longer than the trained length comes out as there only if one step computes it whole: with this type, and past the
    trained length only, how a prompt is cut into steps changes the result, and a cached prefix is valid only for
    prompts of the same length. `depends_on_length` tells an engine so. Unlike transformers, a request's base depends on
    its own length, never on its neighbours in the batch or on the request before.

    Args:
        theta: Base at and below the trained length.
        factor: How fast the base grows.
        max_positions: The trained length in tokens.
        rotary_dim: Dimensions of a head that are turned.
    """

    depends_on_length = True
    _exponents: Tensor

    def __init__(
        self, theta: float, factor: float, max_positions: int, rotary_dim: int, *, interleaved: bool = False
    ) -> None:
        super().__init__(inverse_frequencies(theta, rotary_dim), interleaved=interleaved)
        self.theta = theta
        self.factor = factor
        self.max_positions = max_positions
        self.rotary_dim = rotary_dim
        self.register_buffer(
            "_exponents", torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim, persistent=False
        )

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


def inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """float32 [rotary_dim / 2], theta ** (-2i / rotary_dim): the angle per position of pair i."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / theta**exponents
