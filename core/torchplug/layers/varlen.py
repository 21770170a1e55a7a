"""The attention backend for CUDA: PyTorch's `varlen_attn`, flash attention that reads block tables on the device.

One call attends a whole step, prompts and single tokens together, from the paged cache. What is true of it was read in
PyTorch 2.13's own source (`torch/nn/attention/varlen.py`, `flash_attn/flash_api.cpp`); it has flash attention 2
inside, or 3 where a program has activated it:

* float16 and bfloat16, compute capability 8.0 and above, heads of at most 256 values and a multiple of 8.
* Flash attention 2 reads pages whose tokens are a multiple of 256; version 3 any. It takes the offsets of the keys
  (`cu_seq_k`) though a block table makes them meaningless, and version 3 refuses them.
* With a block table, version 2 divides long sequences among thread blocks ("split KV") and then writes the wrong rows
  (pytorch issue 194167, open as this is written). `num_splits=1` forbids that. It also makes a request's result
  independent of its neighbours in the batch, in every bit.
* `max_q` and `max_k` are upper bounds. With `max_q` 1 there must be exactly one query token per request.
* A window is (tokens to the left, tokens to the right) besides the token itself, counted from the end of the keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from torchplug.forward_context import ForwardContext

BLOCK_TOKENS: Final = 256
_OLDEST: Final = (2, 13)
_OLDEST_CAPABILITY: Final = (8, 0)
_LARGEST_HEAD: Final = 256


def refusal(head_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why `varlen_attn` cannot serve such layers on a CUDA device; None where it can."""
    if torch.version.hip is not None:
        return "varlen_attn with block tables is not known to work on ROCm"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < _OLDEST:
        return f"varlen_attn takes block tables and num_splits from PyTorch 2.13 on, this is {torch.__version__}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"varlen_attn computes in float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_size % 8 or head_size > _LARGEST_HEAD:
        return f"varlen_attn has no heads of size {head_size}: a multiple of 8 up to {_LARGEST_HEAD}"
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        return f"varlen_attn needs compute capability 8.0, the device has {capability[0]}.{capability[1]}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of PyTorch has no flash attention"
    active = torch.nn.attention.current_flash_attention_impl()
    if active not in (None, "FA3"):
        return f"flash attention implementation {active!r} is active, which is not known to work with block tables"
    return None


def load_kernel() -> Callable[..., Any]:
    """PyTorch's function. Imported here, since on CPU nobody needs what it registers."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Arguments that all layers with one window and cache group share in a step.

    Attributes:
        write: int64 [num_tokens], the slot of each token.
        cu_seq_q: int32 [num_reqs + 1].
        cu_seq_k: int32 [num_reqs + 1], or None where the kernel wants none.
        seqused_k: int32 [num_reqs].
        block_table: int32 [num_reqs, blocks].
        block_size: Tokens of a block.
        max_q: Most new tokens of a request.
        max_k: Most tokens of a request, or more.
        window: (left, right), as `varlen_attn` counts.
    """

    write: Tensor
    cu_seq_q: Tensor
    cu_seq_k: Tensor | None
    seqused_k: Tensor
    block_table: Tensor
    block_size: int
    max_q: int
    max_k: int
    window: tuple[int, int]


class _Latest(threading.local):
    context: ForwardContext | None = None
    plans: dict[tuple[int | None, int], StepPlan]
    cu_seq_k: Tensor | None


class VarlenBackend:
    """`varlen_attn` over a cache of [num_slots, num_kv_heads, head_size] for keys and for values.

    Args:
        kernel: PyTorch's function (`load_kernel`).
    """

    name: Final = "varlen_attn"
    block_multiple: Final = BLOCK_TOKENS
    replayable: Final = True

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        self._takes_key_offsets = torch.nn.attention.current_flash_attention_impl() is None

    def allocate_kv_cache(
        self, num_slots: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, each [num_slots, num_kv_heads, head_size], not initialised: the kernel reads no further than
        each request's length."""
        shape = (num_slots, num_kv_heads, head_size)
        return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)

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
    ) -> StepPlan:
        """The plan for `context`. Nothing here reads lengths or blocks on the host, so a CUDA graph may hold it."""
        if context is None or kv_cache is None:
            raise RuntimeError("varlen attention reads the cache: without one, the layer attends by sdpa")
        latest = _latest
        if latest.context is not context:
            latest.context = context
            latest.plans = {}
            latest.cu_seq_k = None
            if self._takes_key_offsets:
                latest.cu_seq_k = F.pad(context.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        plan = latest.plans.get((window, group))
        if plan is None:
            layout = context.more_groups[group - 1] if group else context
            lengths = context.query_lens_host
            max_q = max(lengths)
            if max_q == 1 and min(lengths) == 0:
                max_q = 2  # a bound; with 1, the kernel takes for granted that every request has a query token
            if window is not None:
                sides = (window - 1, 0)
            else:
                # One token sees all keys there are; without a bound on the right, the kernel serves a group of query
                # heads at once.
                sides = (-1, -1) if max_q == 1 else (-1, 0)
            plan = StepPlan(
                write=layout.slot_mapping,
                cu_seq_q=context.query_start_loc,
                cu_seq_k=latest.cu_seq_k,
                seqused_k=context.seq_lens,
                block_table=layout.block_tables,
                block_size=context.block_size,
                max_q=max_q,
                max_k=layout.block_tables.shape[1] * context.block_size,
                window=sides,
            )
            latest.plans[window, group] = plan
        return plan

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: tuple[Tensor, Tensor] | None,
        plan: StepPlan,
        num_kv_heads: int,
        head_size: int,
        scale: float,
    ) -> Tensor:
        """Store the new keys and values, then attend. Shapes as in `Attention.forward`."""
        assert kv_cache is not None, "plan_step refuses a layer without a cache"
        keys, values = kv_cache
        keys.index_copy_(0, plan.write, key.reshape(-1, num_kv_heads, head_size))
        values.index_copy_(0, plan.write, value.reshape(-1, num_kv_heads, head_size))
        pages = (-1, plan.block_size, num_kv_heads, head_size)
        queries = query.reshape(query.shape[0], -1, head_size)
        result: Tensor = self._kernel(
            queries if queries.stride(-1) == 1 else queries.contiguous(),
            keys.view(pages),
            values.view(pages),
            plan.cu_seq_q,
            plan.cu_seq_k,
            plan.max_q,
            plan.max_k,
            scale=scale,
            window_size=plan.window,
            enable_gqa=True,
            seqused_k=plan.seqused_k,
            block_table=plan.block_table,
            num_splits=1,
        )
        return result.reshape(query.shape[0], -1)


_latest = _Latest()
