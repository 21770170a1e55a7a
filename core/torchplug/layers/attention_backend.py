"""What the attention layer asks of a backend, and which backend a layer gets: decided once, with its cache.

`sdpa` runs on every device and is the reference. `varlen` is PyTorch's paged flash attention, for CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchplug.forward_context import ForwardContext
from torchplug.layers import sdpa, varlen


class AttentionBackend(Protocol):
    """Keeps keys and values, plans a step once, and attends in every layer."""

    @property
    def name(self) -> str:
        """What it is called where a user sees it."""

    @property
    def block_multiple(self) -> int:
        """The tokens of a cache block must be a multiple of this."""

    @property
    def replayable(self) -> bool:
        """Whether a step of one new token for each request launches the same kernels over the same memory whatever the
        lengths and blocks are, reading them on the device: what a CUDA graph of it needs."""

    def allocate_kv_cache(
        self, num_slots: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer in the backend's own layout, not initialised."""

    def plan_step(
        self,
        context: ForwardContext | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: tuple[Tensor, Tensor] | None,
        window: int | None,
        *,
        group: int,
    ) -> Any:
        """What the layers with this window and cache group do in this step; made by the first that asks, shared by the
        others. Arguments as in `sdpa.plan_step`."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: tuple[Tensor, Tensor] | None,
        plan: Any,
        num_kv_heads: int,
        head_size: int,
        scale: float,
    ) -> Tensor:
        """Store the new keys and values, then attend. Shapes as in `Attention.forward`."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """A backend and, where a device could do better, why it is not the better one."""

    backend: AttentionBackend
    why: str = ""


def choose_backend(head_size: int, cache_dtype: torch.dtype, dtype: torch.dtype, device: torch.device) -> BackendChoice:
    """The backend for layers with heads of that size.

    Args:
        head_size: Size of one head.
        cache_dtype: Of cached keys and values.
        dtype: Of the queries.
        device: Of all of them.
    """
    if device.type != "cuda":
        return BackendChoice(sdpa)
    refusal = varlen.refusal(head_size, dtype, device)
    if refusal is None and cache_dtype != dtype:
        refusal = f"varlen_attn takes keys of the queries' dtype {dtype}, the cache holds {cache_dtype}"
    if refusal is not None:
        return BackendChoice(sdpa, refusal)
    return BackendChoice(varlen.VarlenBackend(varlen.load_kernel()))
