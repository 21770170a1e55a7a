"""The native kernels as functions of tensors.

`linear`, `experts` and `rms_norm` are asked once, at load, and give a function that computes, or None where this
machine, build or dtype has no kernel; the others have no weights and are called with a step's tensors. A function takes
what its layer takes; where the kernel cannot read the tensors it is given (another dtype, device or shape; traced,
compiled or differentiated), it computes with torch, or gives None for the layer to do so.

A call costs what its Python costs, 3 to 6 us, and a small model's step has a hundred: what stays the same lies in a
structure, and tensors are made and asked by the cheapest calls there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from torchplug.layers.cpu.build import library
from torchplug.layers.native import native_kernels_allowed

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

MOST_ROWS = 256
"""Rows above which F.linear is as fast: it then spends little of its time on rearranging the weight. Measured in
benchmarks/README.md."""

CODES = {torch.float32: 0, torch.bfloat16: 1}
_empty, _empty_like, _threads = torch.empty, torch.empty_like, torch.get_num_threads
_compiling = torch.compiler.is_compiling


def readable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel for `dtype` may be given the memory of `x`."""
    return x.dtype is dtype and x.is_cpu and type(x) is Tensor and not x.requires_grad and not _compiling()


def kernel(name: str, like: Tensor, dtype: torch.dtype, fits: bool = True) -> tuple[Callable[..., int] | None, int]:
    """The kernel `name`, or None where it does not serve `dtype` on the device of `like`, and the code of `dtype`."""
    served = fits and like.is_cpu and dtype in CODES
    return (_function(name) if served else None), CODES.get(dtype, 0)


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("dtype", c_int),
        ("result", c_int),
    )


def linear(weight: Tensor, *, result: torch.dtype | None = None) -> Product | None:
    """`F.linear` for weights [out, in] like this one, read where they lie; None where there is no kernel, or the
    model is to be compiled.

    `result`: float32 for sums that are not rounded to the weight's dtype.
    """
    run, code = kernel("torchplug_linear", weight, weight.dtype, native_kernels_allowed())
    if run is None:
        return None
    dtype, (out_features, in_features) = weight.dtype, weight.shape
    result = result or dtype
    matrix = _Matrix(in_features, out_features, code, CODES[result])

    # Its last argument keeps the structure alive, of which only the address is used.
    def product(x: Tensor, weight: Tensor, bias: Tensor | None, matrix: _Matrix = matrix) -> Tensor:
        shape = x.shape
        rows = shape[0] if len(shape) == 2 else shape[:-1].numel()
        if rows > MOST_ROWS or not readable(x, dtype) or shape[-1] != in_features or not weight.is_contiguous():
            y = F.linear(x, weight, bias)
            return y.to(result) if y.dtype is dtype else y
        if not x.is_contiguous():
            x = x.contiguous()
        y = x.new_empty(rows, out_features) if result is dtype else _empty(rows, out_features, dtype=result)
        added = 0 if bias is None else bias.data_ptr()
        run(address, weight.data_ptr(), added, x.data_ptr(), y.data_ptr(), rows, _threads())
        return y if len(shape) == 2 else y.view(*shape[:-1], out_features)

    address = ctypes.addressof(matrix)
    return product


class _Experts(ctypes.Structure):
    _fields_ = (("gate_up", _Matrix), ("down", _Matrix), ("slots", c_int64))


Experts = Callable[
    [Tensor, Tensor, "Tensor | None", Tensor, "Tensor | None", Tensor, Tensor],
    "Tensor | None",
]


def experts(w13: Tensor, w2: Tensor) -> Experts | None:
    """(x, w13, b13, w2, b2, slots, weights) -> the weighted sum of each token's experts, gated by silu, for weights
    [slots, 2 * inner, hidden] and [slots, hidden, inner] like these; None where there is no kernel.

    x: [tokens, hidden]; slots int64 and weights float32, both [tokens, top_k]; a slot that there is not gives nothing.
    The function raises MemoryError.
    """
    run, code = kernel("torchplug_experts", w13, w13.dtype, w2.dtype is w13.dtype and native_kernels_allowed())
    if run is None:
        return None
    dtype, (num_slots, hidden, inner) = w13.dtype, w2.shape
    layer = _Experts(_Matrix(hidden, 2 * inner, code, code), _Matrix(inner, hidden, code, code), num_slots)

    def experts_of(
        x: Tensor,
        w13: Tensor,
        b13: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        slots: Tensor,
        weights: Tensor,
        layer: _Experts = layer,
    ) -> Tensor | None:
        tokens, top_k = slots.shape
        if (
            tokens * top_k > MOST_ROWS * num_slots
            or not readable(x, dtype)
            or slots.dtype is not torch.int64
            or weights.dtype is not torch.float32
            or x.shape != (tokens, hidden)
            or weights.shape != slots.shape
            or not (w13.is_contiguous() and w2.is_contiguous())
        ):
            return None
        x, slots, weights = x.contiguous(), slots.contiguous(), weights.contiguous()
        y = _empty(tokens, hidden, dtype=dtype)
        failed = run(
            address, w13.data_ptr(), 0 if b13 is None else b13.data_ptr(),
            w2.data_ptr(), 0 if b2 is None else b2.data_ptr(),
            x.data_ptr(), slots.data_ptr(), weights.data_ptr(), y.data_ptr(), tokens, top_k, _threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the rows of a step's experts")
        return y

    address = ctypes.addressof(layer)
    return experts_of


class _Norm(ctypes.Structure):
    _fields_ = (("size", c_int64), ("eps", c_float), ("dtype", c_int))


Normalise = Callable[[Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor] | None]


def rms_norm(weight: Tensor) -> Normalise | None:
    """(x, weight, residual, eps) -> (normalised, x + residual) for weights like this one; None where there is no
    kernel, or the model is to be compiled."""
    run, code = kernel("torchplug_rms_norm", weight, weight.dtype, native_kernels_allowed())
    if run is None:
        return None
    dtype, size, (features,) = weight.dtype, weight.element_size(), weight.shape
    norm, current = _Norm(features, 0.0, code), 0.0

    def normalise(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor] | None:
        nonlocal current
        if eps != current:
            norm.eps = current = eps
        shape, strides = x.shape, x.stride()
        if not readable(x, dtype) or shape[-1] != features or strides[-1] != 1:
            return None
        if len(shape) == 2:
            outer, inner, outer_stride, inner_stride = shape[0], 1, strides[0] * size, 0
        elif len(shape) == 3:
            outer, inner, outer_stride, inner_stride = shape[0], shape[1], strides[0] * size, strides[1] * size
        else:
            return None
        added, to = 0, 0
        summed = x
        if residual is not None:
            if not readable(residual, dtype) or residual.shape != shape or not residual.is_contiguous():
                return None
            summed = _empty_like(residual)
            added, to = residual.data_ptr(), summed.data_ptr()
        # Half the price of `empty`, and without gaps where `x` is.
        out = _empty_like(x) if x.is_contiguous() else _empty(*shape, dtype=dtype)
        run(
            address, weight.data_ptr(), x.data_ptr(), outer, inner, outer_stride, inner_stride,
            added, out.data_ptr(), to, _threads(),
        )  # fmt: skip
        return out, summed

    address = ctypes.addressof(norm)
    return normalise


def silu_and_mul(gate_up: Tensor) -> Tensor | None:
    """`silu(gate) * up` of [rows, 2 * n]; None where there is no kernel for this tensor."""
    dtype, shape = gate_up.dtype, gate_up.shape
    if not readable(gate_up, dtype) or len(shape) != 2 or shape[1] % 2 or not gate_up.is_contiguous():
        return None
    run, code = _function("torchplug_silu_and_mul"), CODES.get(dtype)
    if run is None or code is None:
        return None
    rows, size = shape[0], shape[1] // 2
    out = gate_up.new_empty(rows, size)
    run(gate_up.data_ptr(), out.data_ptr(), rows, size, _threads(), code)
    return out


def rotary(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, interleaved: bool) -> Tensor | None:
    """`apply_rotary`, cos and sin being [rows, 1, rotary_dim]; None where there is no kernel for these tensors."""
    dtype = x.dtype
    if not readable(x, dtype) or not readable(cos, dtype) or not readable(sin, dtype):
        return None
    run, code = _function("torchplug_rotary"), CODES.get(dtype)
    if run is None or code is None or not cos.is_contiguous() or not sin.is_contiguous():
        return None
    (rows, width), (row_stride, stride), (turned, _, rotary_dim) = x.shape, x.stride(), cos.shape
    if stride != 1 or width % head_size or rotary_dim > head_size or turned != rows or sin.shape != cos.shape:
        return None
    out = x.new_empty(rows, width)
    run(
        x.data_ptr(), row_stride * x.element_size(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(),
        rows, width // head_size, head_size, rotary_dim, interleaved, _threads(), code,
    )  # fmt: skip
    return out


class _Rotary(ctypes.Structure):
    _fields_ = (("pairs", c_int64), ("scaling", c_float), ("interleaved", c_int), ("dtype", c_int))


@cache
def _rotary(pairs: int, scaling: float, interleaved: bool, code: int) -> _Rotary:
    return _Rotary(pairs, scaling, interleaved, code)


def rotation(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype, scaling: float, interleaved: bool
) -> tuple[Tensor, Tensor] | None:
    """cos and signed sin of a `Rotation`, [rows, 1, 2 * pairs], for positions [rows] and frequencies [pairs]; None
    where there is no kernel for these."""
    if not readable(positions, torch.int64) or not readable(frequencies, torch.float32) or frequencies.dim() != 1:
        return None
    run, code = _function("torchplug_rotation"), CODES.get(dtype)
    if run is None or code is None or not positions.is_contiguous() or not frequencies.is_contiguous():
        return None
    (rows,), (pairs,) = positions.shape, frequencies.shape
    cos, sin = _empty(2, rows, 1, 2 * pairs, dtype=dtype).unbind()
    structure = ctypes.addressof(_rotary(pairs, scaling, interleaved, code))
    run(
        structure, positions.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, _threads()
    )  # fmt: skip
    return cos, sin


def argmax(x: Tensor) -> Tensor | None:
    """int64 [rows], the first index of each row's maximum, -1 for a row with a NaN; None where there is no kernel."""
    if not readable(x, x.dtype) or not x.is_contiguous():
        return None
    run, code = _function("torchplug_argmax"), CODES.get(x.dtype)
    if run is None or code is None:
        return None
    rows, size = x.shape
    out = _empty(rows, dtype=torch.int64)
    run(x.data_ptr(), rows, size, out.data_ptr(), _threads(), code)
    return out


class _Step(ctypes.Structure):
    _fields_ = (
        ("tables", c_void_p),
        ("lengths", c_void_p),
        ("slots", c_void_p),
        ("requests", c_int64),
        ("table_width", c_int64),
        ("block_size", c_int64),
        ("window", c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (("kv_heads", c_int64), ("group", c_int64), ("head_size", c_int64), ("scale", c_float), ("dtype", c_int))


class PagedStep:
    """One new token for each of `len(lengths)` requests, for all layers of one cache group and window.

    Args:
        tables: int32 [requests, blocks], block ids.
        lengths: int32 [requests], tokens of each request with the new one.
        slots: int64 [requests], where the new keys and values go.
        block_size: Tokens of a block.
        window: Only so many last tokens are seen; None for all.
    """

    __slots__ = ("_tensors", "address", "requests", "structure")

    def __init__(self, tables: Tensor, lengths: Tensor, slots: Tensor, block_size: int, window: int | None) -> None:
        self._tensors = tables.contiguous(), lengths.contiguous(), slots.contiguous()
        self.requests = len(lengths)
        self.structure = _Step(
            *[tensor.data_ptr() for tensor in self._tensors], self.requests, tables.shape[1], block_size, window or 0
        )
        self.address = ctypes.addressof(self.structure)


def pages(query: Tensor, key: Tensor, value: Tensor, keys: Tensor) -> bool:
    """Whether `paged_attention` can be given tensors like these, `keys` being the cache's, [1, num_kv_heads, slots,
    head_size]."""
    dtype = query.dtype
    return (
        readable(query, dtype)
        and key.dtype is value.dtype is keys.dtype is dtype
        and key.shape == value.shape == (query.shape[0], keys.shape[1] * keys.shape[3])
        and query.shape[1] % key.shape[1] == 0
        and dtype in CODES
        and _function("torchplug_paged_attention") is not None
    )


def paged_attention(
    step: PagedStep,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    num_kv_heads: int,
    head_size: int,
    scale: float,
) -> Tensor:
    """Store the new keys and values, attend each query to its request's cached tokens.

    query: [requests, heads * head_size], key and value: [requests, num_kv_heads * head_size], rows anywhere. keys and
    values: the cache, in memory [slots, num_kv_heads, head_size]. Raises MemoryError.
    """
    run, dtype, width, size = _function("torchplug_paged_attention"), query.dtype, query.shape[1], query.element_size()
    assert run is not None
    (query_stride, a), (key_stride, b), (value_stride, c) = query.stride(), key.stride(), value.stride()
    if a != 1 or b != 1 or c != 1:
        contiguous = query.contiguous(), key.contiguous(), value.contiguous()
        return paged_attention(step, *contiguous, keys, values, num_kv_heads, head_size, scale)
    out = query.new_empty(step.requests, width)
    layer = _layer(num_kv_heads, width // (num_kv_heads * head_size), head_size, scale, CODES[dtype])
    failed = run(
        step.address, ctypes.addressof(layer),
        query.data_ptr(), query_stride * size, key.data_ptr(), key_stride * size, value.data_ptr(), value_stride * size,
        keys.data_ptr(), values.data_ptr(), out.data_ptr(), _threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for the partial results of attention")
    return out


@cache
def _layer(num_kv_heads: int, group: int, head_size: int, scale: float, code: int) -> _Layer:
    return _Layer(num_kv_heads, group, head_size, scale, code)


@cache
def _function(name: str) -> Callable[..., int] | None:
    """A kernel as a function of integers: sizes and addresses."""
    native = library()
    if native is None:
        return None
    make = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p)(("torchplug_callable", native))
    made: Callable[..., int] = make(ctypes.cast(native[name], c_void_p))
    return made
