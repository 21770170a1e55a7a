"""The KV cache of all attention layers, in blocks: how many there are, what they cost, and their memory.

Layers with the same sliding window keep and drop the same tokens, so they form a group with block ids of its own; a
model of one kind of layer has one group. Recurrent layers keep a slot per request beside the blocks. Memory is divided
so that every group, and the state slots, hold the same number of requests.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torchplug.engine.cache_memory import default_cache_bytes
from torchplug.errors import DeviceError, Problem
from torchplug.layers.attention import Attention, allocate_kv_cache
from torchplug.layers.attention_backend import BackendChoice, choose_backend

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchplug.engine.state_pool import StatePool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block ids.

    Attributes:
        window: Only so many last tokens of a request are read; None for all.
        layers: The layers.
        block_bytes: What a block costs in all of them.
        blocks_per_request: Blocks of the longest request that is possible.
        num_blocks: Blocks that requests get; ids 0 to num_blocks - 1.
    """

    window: int | None
    layers: tuple[Attention, ...]
    block_bytes: int
    blocks_per_request: int
    num_blocks: int

    @property
    def padding_block(self) -> int:
        """Where padding rows keep their tokens, in a cache with `padding_block`: behind the others."""
        return self.num_blocks


SNAPSHOTS_PER_REQUEST: Final = 3
"""State slots beside a request's own, for snapshots, where memory allows: one at the end of its prompt, one that goes
along as it decodes, one of a prefix that others share."""


class PagedCache:
    """Caches of the `Attention` layers of a module, and the slots of its recurrent ones.

    On CPU the memory is taken from the system as blocks are written, not at once.

    Args:
        module: The model; each layer's `kv_cache`, `backend` and `cache_group` are set here and nowhere else.
        dtype: Of keys and values, where a layer's spec names none.
        device: Where they live.
        block_size: Tokens of a block, or fewer than the layers' backends need.
        max_num_seqs: Most requests at once; there are never more blocks than these need.
        max_num_batched_tokens: Most tokens in one step, which a sliding layer keeps beside its window.
        max_model_len: Most tokens of a request.
        memory_bytes: Most bytes; None: `default_cache_bytes`.
        padding: Whether a step may have padding rows, where all layers' backends can be replayed.
        states: Of the module's recurrent layers, without memory yet; None where it has none.
        snapshots: Whether states are kept for later requests.

    Attributes:
        groups: Empty where the module has no attention layer of ours.
        states: As given, with its memory.
        block_size: As given, or the next larger one that every backend takes.
        backends: What attends in each layer, and why.
        padding_block: Whether each group has one block more, behind its others, which no request ever gets: padding
            rows keep their tokens there.
        num_bytes: Of all blocks and state slots.
        max_tokens: Longest request that fits; max_model_len unless memory is short.
        max_num_seqs: As given; less where memory holds fewer states.
        concurrency: Requests of `max_tokens` that fit at once, at most max_num_seqs.

    Raises:
        DeviceError: The memory is not there, or too small for one block of each layer and one state.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        memory_bytes: int | None = None,
        padding: bool = False,
        states: StatePool | None = None,
        snapshots: bool = False,
    ) -> None:
        self.states = states
        self.max_tokens = max_model_len
        self.max_num_seqs = max_num_seqs
        self.concurrency = float(max_num_seqs)
        self._layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
        self.backends = tuple(_choose(layer, dtype, device) for layer in self._layers)
        multiple = math.lcm(*[choice.backend.block_multiple for choice in self.backends])
        self.block_size = block_size = -(-block_size // multiple) * multiple
        self.padding_block = (
            padding and bool(self._layers) and all(choice.backend.replayable for choice in self.backends)
        )
        by_window: dict[int | None, list[Attention]] = {}
        for layer in self._layers:
            window = layer.kv_cache_spec().sliding_window
            by_window.setdefault(None if window is None or window >= max_model_len else window, []).append(layer)
        costs = {
            window: sum(_token_bytes(layer, dtype) for layer in layers) * block_size
            for window, layers in by_window.items()
        }

        def blocks(window: int | None, num_tokens: int) -> int:
            """Blocks that a request of that length holds at most."""
            whole = -(-num_tokens // block_size)
            # A chunk and the window before it, starting and ending anywhere in a block.
            kept = whole if window is None else (window - 1 + max_num_batched_tokens + block_size - 2) // block_size + 1
            return min(whole, kept)

        def cost(num_tokens: int) -> int:
            return sum(blocks(window, num_tokens) * costs[window] for window in by_window)

        shares = dict.fromkeys(by_window, 0)
        num_states = 0
        if by_window or states is not None:
            memory = default_cache_bytes(device) if memory_bytes is None else memory_bytes
            if self.padding_block:
                memory = max(0, memory - sum(costs.values()))
            if states is not None:
                per_request = 1 + SNAPSHOTS_PER_REQUEST if snapshots else 1
                num_states = _num_states(states.slot_bytes, per_request, max_num_seqs, cost(max_model_len), memory)
                num_states = max(1, min(num_states, (memory - cost(1)) // states.slot_bytes))
                if memory < states.slot_bytes + cost(1):
                    says = f"{memory} bytes do not hold {self._least()} ({states.slot_bytes + cost(1)} bytes)"
                    raise _no_memory(device, says)
                memory -= num_states * states.slot_bytes
                # Where memory is short, requests and snapshots share it.
                self.max_num_seqs = min(max_num_seqs, max(1, num_states // min(per_request, 2)))
                self.concurrency = float(self.max_num_seqs)
        if by_window:
            if memory < cost(max_model_len):
                self.max_tokens = _largest(lambda n: cost(n * block_size) <= memory, -(-max_model_len // block_size))
                self.max_tokens = min(self.max_tokens * block_size, max_model_len)
                if not self.max_tokens:
                    raise _no_memory(device, f"{memory} bytes do not hold {self._least()} ({cost(1)} bytes)")
            room = min(float(max_num_seqs), memory / cost(self.max_tokens))
            shares = {window: int(blocks(window, self.max_tokens) * room) for window in by_window}
            self.concurrency = min(self.concurrency, room)
        self.groups = tuple(
            CacheGroup(window, tuple(layers), costs[window], blocks(window, self.max_tokens), shares[window])
            for window, layers in by_window.items()
        )
        extra = int(self.padding_block)
        self.num_bytes = sum((group.num_blocks + extra) * group.block_bytes for group in self.groups)
        self.num_bytes += 0 if states is None else num_states * states.slot_bytes
        self._allocate(dtype, device, num_states)
        if self.groups or states is not None:
            _log.info("%s", self)

    def __str__(self) -> str:
        room = f"room for {self.concurrency:.1f} requests"
        if not self.groups:
            return "KV cache: none" if self.states is None else f"State: {self.states}, {room} at once; no KV cache"
        blocks = " + ".join(
            str(group.num_blocks) + ("" if group.window is None else f" (window {group.window})")
            for group in self.groups
        )
        block_bytes = sum(group.num_blocks * group.block_bytes for group in self.groups)
        states = "" if self.states is None else f"; state: {self.states}"
        return (
            f"KV cache: {block_bytes / 2**30:.2f} GiB in {blocks} blocks of {self.block_size} tokens{states}, "
            f"{room} of {self.max_tokens} tokens at once"
        )

    def describe_backends(self) -> str:
        """What attends, and why it is not something better: "varlen_attn", or for example "varlen_attn in 30 layers,
        scaled_dot_product_attention in 2 (reason)"."""
        counts = Counter((choice.backend.name, choice.why) for choice in self.backends)
        parts = [
            name + (f" in {count} layers" if len(counts) > 1 else "") + (f" ({why})" if why else "")
            for (name, why), count in counts.items()
        ]
        return ", ".join(parts) or "the model's own"

    def as_dict(self) -> dict[str, int | float]:
        """What `str` says, as data."""
        return {
            "kv_cache_bytes": self.num_bytes,
            "num_blocks": sum(group.num_blocks for group in self.groups),
            "block_size": self.block_size,
            "max_tokens": self.max_tokens,
            "concurrency": self.concurrency,
        }

    def clear(self) -> None:
        """Give all memory back."""
        for layer in self._layers:
            layer.kv_cache = None
        if self.states is not None:
            self.states.clear()

    def _least(self) -> str:
        block = f"one block of {self.block_size} tokens in {len(self._layers)} layers" if self._layers else ""
        return " and ".join(filter(None, (block, "" if self.states is None else "the state of one request")))

    def _allocate(self, dtype: torch.dtype, device: torch.device, num_states: int) -> None:
        try:
            for layer, choice in zip(self._layers, self.backends, strict=True):
                layer.backend = choice.backend
            if self.states is not None:
                self.states.allocate(self.max_num_seqs, num_states - self.max_num_seqs, device)
            for index, group in enumerate(self.groups):
                num_blocks = group.num_blocks + int(self.padding_block)
                for layer in group.layers:
                    layer.cache_group = index
                    layer.kv_cache = allocate_kv_cache(
                        layer.kv_cache_spec(), num_blocks, self.block_size, dtype, device, layer.backend
                    )
        except (RuntimeError, MemoryError) as error:
            self.clear()
            layers = len(self._layers) + (0 if self.states is None else len(self.states.layers))
            raise _no_memory(device, f"no memory for {self.num_bytes} bytes in {layers} layers") from error
        except BaseException:
            self.clear()
            raise


def _choose(layer: Attention, dtype: torch.dtype, device: torch.device) -> BackendChoice:
    spec = layer.kv_cache_spec()
    return choose_backend(spec.head_size, spec.dtype or dtype, dtype, device)


def _num_states(slot: int, per_request: int, max_num_seqs: int, blocks: int, memory: int) -> int:
    """State slots: what the limits can use, else as many requests' as of blocks (`blocks` bytes for the longest one).

    A quarter of the memory is theirs where that is more, since most requests are shorter than the longest possible.
    """
    wanted = per_request * max_num_seqs
    fits = int(per_request * min(max_num_seqs, memory / (blocks + per_request * slot))) if blocks else memory // slot
    if memory - memory // 4 >= blocks:
        fits = max(fits, memory // 4 // slot)
    return max(1, min(wanted, fits))


def _token_bytes(layer: Attention, dtype: torch.dtype) -> int:
    spec = layer.kv_cache_spec()
    return 2 * spec.num_kv_heads * spec.head_size * (spec.dtype or dtype).itemsize


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where every smaller one does too; 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _no_memory(device: torch.device, says: str) -> DeviceError:
    fix = "raise kv_cache_memory_bytes, or lower max_model_len or max_num_seqs"
    return DeviceError(f"device {str(device)!r}", Problem("KV cache", says, fix))
