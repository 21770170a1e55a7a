"""The attention layer: causal self-attention of a flat batch against each request's own cached keys and values.

The layer knows shapes; how the step's requests are attended, and where the cache keeps things, is the backend's
(`attention_backend`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchplug.forward_context import get_forward_context
from torchplug.layers import sdpa
from torchplug.layers.attention_backend import AttentionBackend

KVCache = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one attention layer keeps per token: a key and a value of [num_kv_heads, head_size].

    `dtype` None is the model's. `sliding_window`: only the last so many tokens of a request are ever read; None for
    all.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype | None = None
    sliding_window: int | None = None


def allocate_kv_cache(
    spec: KVCacheSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: AttentionBackend = sdpa,
) -> KVCache:
    """The cache of one layer: (keys, values) for num_blocks * block_size tokens, in the layout of `backend`.

    `spec.dtype`, where given, wins over `dtype`. The pair is for the `kv_cache` of an `Attention` with that `backend`;
    nothing else should look inside.
    """
    return backend.allocate_kv_cache(
        num_blocks * block_size, spec.num_kv_heads, spec.head_size, spec.dtype or dtype, torch.device(device)
    )


class Attention(nn.Module):
    """Causal attention with grouped query heads.

    Args:
        num_heads: Query heads.
        head_size: Size of one head.
        scale: Factor on the scores, usually head_size ** -0.5.
        num_kv_heads: Key and value heads, a divisor of num_heads; None for as many.
        sliding_window: A token sees itself and the `sliding_window - 1` tokens before it; None for all before it.
        prefix: The layer's name in the model.

    The engine sets `kv_cache` (see `allocate_kv_cache`), the `backend` that it is for, and `cache_group`, the layer's
    place among the layouts of a context; it publishes a ForwardContext for each step. Without a context the batch is
    one sequence from position 0. With a context but no cache, each request must be new in this step.
    """

    opaque_name: str = ""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *,
        sliding_window: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.prefix = prefix
        self.backend: AttentionBackend = sdpa
        self.kv_cache: KVCache | None = None
        self.cache_group = 0
        if self.num_kv_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(
                f"Attention {prefix!r}: {num_heads} query heads cannot share {num_kv_heads} key heads evenly"
            )
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"Attention {prefix!r}: sliding_window {sliding_window} is below 1")

    def kv_cache_spec(self) -> KVCacheSpec:
        """What this layer keeps per token."""
        return KVCacheSpec(self.num_kv_heads, self.head_size, None, self.sliding_window)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend every token of the step to its request's tokens up to itself, and store its key and value.

        Args:
            query: [num_tokens, num_heads * head_size], already rotated.
            key: [num_tokens, num_kv_heads * head_size], already rotated.
            value: [num_tokens, num_kv_heads * head_size].

        Returns [num_tokens, num_heads * head_size].
        """
        if self.opaque_name and torch.compiler.is_compiling():
            result: Tensor = torch.ops.torchplug.attention(query, key, value, self.opaque_name)
            return result
        return self.attend(query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`forward`, also where it is called from a compiled graph."""
        context = get_forward_context()
        # The reference attends what the batch itself holds; every other backend reads the cache.
        backend = sdpa if context is None or self.kv_cache is None else self.backend
        plan = backend.plan_step(context, query, key, value, self.kv_cache, self.sliding_window, group=self.cache_group)
        return backend.attend(query, key, value, self.kv_cache, plan, self.num_kv_heads, self.head_size, self.scale)

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_size={self.head_size}, "
            f"sliding_window={self.sliding_window}, prefix={self.prefix!r}"
        )
