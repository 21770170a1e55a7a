"""Linear layers in oneDNN's own weight layout: for matrix products on CPU where there is no kernel of our own (`cpu`),
chosen once, after loading.

F.linear hands oneDNN plain rows, which it has to rearrange on every call. Packed once, the same kernels serve every
batch size better. SmolLM2-135M (tied head left plain, as it then was), ms per step, plain against packed (torch 2.13,
AMD EPYC with AVX512-BF16, 1 thread, CPU time of the thread, 2026-12-01):

    rows        1           2           4           8           128
    bfloat16    41.3  30.5  43.0  34.6  49.7  34.3  60.8  44.2  191  177
    float32     52.3  49.4  89.2  69.3  80.2  55.3  99.3  74.0  394  345

With 2 threads on an idle machine, bfloat16, wall time: 28.5 and 24.6 ms at 1 row, 36.9 and 30.6 at 8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torchplug.layers.native import native_kernels_allowed


def packed(weight: Tensor) -> Tensor | None:
    """`weight` [out, in] in oneDNN's layout, in memory of its own; None where this machine, build or dtype has no such
    path, or where the model is to be compiled.

    The result keeps shape and dtype, serves `linear` only, and gives the plain matrix back through `.to_dense()`.
    """
    if not weight.is_cpu or weight.layout is not torch.strided or not _supported(weight.dtype):
        return None
    if not native_kernels_allowed():
        return None
    _release_freed_memory()()
    result: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` for a packed weight; x and bias plain, in the weight's dtype."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result


@cache
def _supported(dtype: torch.dtype) -> bool:
    """Only where the processor computes in `dtype` itself, and only dtypes that were measured."""
    ops = torch.ops.mkldnn
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch._C._has_mkldnn or not all(hasattr(ops, name) for name in needed):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported()))


@cache
def _release_freed_memory() -> Callable[[], object]:
    """Give the plain matrix that was packed before back to the system, where the C library is glibc.

    Otherwise glibc keeps what was freed for requests of its size, and a model of few, large matrices peaks at up to
    half as much again as its weights. 8 ms in all for SmolLM2's 211 matrices.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    # Windows has no process-wide handle, other C libraries no such function.
    except (OSError, TypeError, AttributeError):
        return lambda: None
    return lambda: trim(0)
