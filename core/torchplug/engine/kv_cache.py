"""The KV cache of all attention layers: one contiguous block per slot, grown as requests need it.

A slot belongs to one running request. Slots and their length grow in powers of two, copying what is there, so a cache
is never larger than twice what the longest request and the largest batch so far have needed, and nothing is reserved
for lengths that nobody reaches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from torchplug.errors import DeviceError, Problem
from torchplug.layers.attention import Attention, allocate_kv_cache, copy_kv_cache

if TYPE_CHECKING:
    import torch
    from torch import nn

_SMALLEST_BLOCK: Final = 256
"""Tokens of the shortest slot: growing from less would copy more often than it saves."""


class SlotCache:
    """Caches of the `Attention` layers of a module.

    Args:
        module: The model; each layer's `kv_cache` is set here and nowhere else.
        dtype: Of keys and values, where a layer's spec names none.
        device: Where they live.
        max_slots: Most slots.
        max_tokens: Most tokens of a slot.

    Attributes:
        layers: The layers found; without any the model has no cache of ours.
        num_slots: Slots there are now.
        block_size: Tokens of a slot now.
    """

    def __init__(
        self, module: nn.Module, *, dtype: torch.dtype, device: torch.device, max_slots: int, max_tokens: int
    ) -> None:
        self.layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
        self.num_slots = 0
        self.block_size = 0
        self._dtype = dtype
        self._device = device
        self._max_slots = max_slots
        self._max_tokens = max_tokens

    def reserve(self, num_slots: int, num_tokens: int) -> None:
        """Make room for `num_tokens` tokens in each of the first `num_slots` slots; what is cached stays.

        Raises:
            DeviceError: There is not enough memory. The cache is empty afterwards.
        """
        if num_slots <= self.num_slots and num_tokens <= self.block_size:
            return
        slots = max(self.num_slots, min(_power_of_two(num_slots), self._max_slots))
        size = max(self.block_size, min(_power_of_two(max(num_tokens, _SMALLEST_BLOCK)), self._max_tokens))
        try:
            for layer in self.layers:
                grown = allocate_kv_cache(layer.kv_cache_spec(), slots, size, self._dtype, self._device)
                if layer.kv_cache is not None:
                    copy_kv_cache(layer.kv_cache, grown, self.num_slots, self.block_size, size)
                layer.kv_cache = grown  # layer by layer, so that only one is there twice
        except (RuntimeError, MemoryError) as error:
            self.clear()
            raise DeviceError(
                f"device {str(self._device)!r}",
                Problem(
                    "KV cache",
                    f"no memory for {slots} requests of {size} tokens in {len(self.layers)} layers",
                    "lower max_num_seqs or max_model_len, or ask for fewer max_tokens",
                ),
            ) from error
        except BaseException:
            self.clear()
            raise
        self.num_slots, self.block_size = slots, size

    def clear(self) -> None:
        """Give all memory back; every slot's content is lost."""
        for layer in self.layers:
            layer.kv_cache = None
        self.num_slots = self.block_size = 0


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
