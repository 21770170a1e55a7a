"""The native kernels of recurrent layers as functions of tensors.

Like `kernels`: asked once, at load, for a function that computes, or None where there is no kernel; the function gives
None for tensors that it cannot read, and the layer computes with torch. One call serves all requests of a step,
whatever they bring, and leaves their states in their slots.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int64, c_void_p

import torch
import torch.nn.functional as F
from torch import Tensor

from torchplug.layers.cpu.build import library
from torchplug.layers.cpu.kernels import CODES, kernel, readable

_MOST_TAPS = 8
_MOST_STATE = 256
_FILLED = 16
"""What the kernels fill rows up to."""

_LOG2_E = 1.4426950408889634
_empty, _threads = torch.empty, torch.get_num_threads


class _Requests(ctypes.Structure):
    _fields_ = (
        ("first", c_void_p),
        ("length", c_void_p),
        ("slot", c_void_p),
        ("fresh", c_void_p),
        ("count", c_int64),
        ("tokens", c_int64),
        ("threads", c_int64),
    )


class StepRequests:
    """The requests of a step in the form that kernels read: for each its first token, how many, its slot (-1 for
    none), and whether it starts from zero."""

    __slots__ = ("_structure", "_table", "address", "tokens")

    def __init__(self, requests: Sequence[tuple[int, int, int, bool]], tokens: int) -> None:
        self.tokens = tokens
        self._table = (c_int64 * (4 * len(requests)))(
            *[value for column in zip(*requests, strict=True) for value in column]
        )
        start, column = ctypes.addressof(self._table), 8 * len(requests)
        self._structure = _Requests(
            *(start + place * column for place in range(4)), len(requests), tokens, torch.get_num_threads()
        )
        self.address = ctypes.addressof(self._structure)


def available() -> bool:
    """Whether there are native kernels at all."""
    return library() is not None


class _Convolution(ctypes.Structure):
    _fields_ = (
        ("channels", c_int64),
        ("taps", c_int64),
        ("filters", c_void_p),
        ("offset", c_void_p),
        ("silu", c_int),
        ("dtype", c_int),
    )


CausalConv = Callable[[Tensor, Tensor | None, StepRequests], Tensor | None]


def causal_conv(
    taps: Tensor, offset: Tensor | None, activation: Callable[[Tensor], Tensor] | None, dtype: torch.dtype
) -> CausalConv | None:
    """(x [tokens, channels], state, requests) -> the convolved tokens, for float32 taps [kernel_size, channels]."""
    kernel_size, channels = taps.shape
    fits = 1 < kernel_size <= _MOST_TAPS and activation in (None, F.silu)
    run, code = kernel("torchplug_causal_conv", taps, dtype, fits)
    if run is None:
        return None
    kept = (taps, offset)
    structure = _Convolution(channels, kernel_size, taps.data_ptr(), _address(offset), activation is not None, code)

    def convolve(
        x: Tensor, state: Tensor | None, requests: StepRequests, kept: object = (structure, kept)
    ) -> Tensor | None:
        if not _rows(x, dtype, requests.tokens, channels) or (state is not None and state.shape[1] < kernel_size - 1):
            return None
        slots = _slots(state, (channels, 1))
        if slots is None:
            return None
        out = _empty(requests.tokens, channels, dtype=dtype)
        run(address, requests.address, *slots, x.data_ptr(), _row(x), out.data_ptr())
        return out

    address = ctypes.addressof(structure)
    return convolve


class _Selective(ctypes.Structure):
    _fields_ = (
        ("channels", c_int64),
        ("size", c_int64),
        ("decay", c_void_p),
        ("bias", c_void_p),
        ("skip", c_void_p),
        ("dtype", c_int),
    )


SelectiveScan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, StepRequests], Tensor | None]


def selective_scan(decay: Tensor, bias: Tensor, skip: Tensor, dtype: torch.dtype) -> SelectiveScan | None:
    """(x, dt, gate [tokens, channels], bc [tokens, 2 * size], state, requests) -> [tokens, channels] in `dtype`: the
    scan by softplus(dt + bias), with the skip, gated by silu; for float32 decay [channels, size]."""
    channels, size = decay.shape
    run, code = kernel("torchplug_selective_scan", decay, dtype, size <= _MOST_STATE)
    if run is None:
        return None
    decay = F.pad(decay * _LOG2_E, (0, _filled(size) - size, 0, _filled(channels) - channels)).contiguous()
    kept = (decay, bias.float(), skip.float())
    structure = _Selective(channels, size, *(tensor.data_ptr() for tensor in kept), code)

    def scan(
        x: Tensor,
        dt: Tensor,
        gate: Tensor,
        bc: Tensor,
        state: Tensor | None,
        requests: StepRequests,
        kept: object = (structure, kept),
    ) -> Tensor | None:
        tokens = requests.tokens
        if not all(_rows(each, dtype, tokens, channels) for each in (x, dt, gate)):
            return None
        slots = _slots(state, (size, 1))
        if slots is None or not _rows(bc, dtype, tokens, 2 * size):
            return None
        if not x.is_contiguous() or not dt.is_contiguous():
            return None
        out = _empty(requests.tokens, channels, dtype=dtype)
        failed = run(
            address, requests.address, *slots, x.data_ptr(), dt.data_ptr(), gate.data_ptr(), _row(gate), bc.data_ptr(),
            _row(bc), out.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for what a scan lays out")
        return out

    address = ctypes.addressof(structure)
    return scan


class _Heads(ctypes.Structure):
    _fields_ = (
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("size", c_int64),
        ("groups", c_int64),
        ("decay", c_void_p),
        ("bias", c_void_p),
        ("skip", c_void_p),
        ("least", c_float),
        ("greatest", c_float),
        ("dtype", c_int),
    )


SsdScan = Callable[[Tensor, Tensor, Tensor | None, StepRequests], Tensor | None]


def ssd_scan(
    decay: Tensor,
    bias: Tensor,
    skip: Tensor,
    *,
    head_dim: int,
    size: int,
    groups: int,
    limit: tuple[float, float],
    dtype: torch.dtype,
) -> SsdScan | None:
    """(xbc [tokens, heads * head_dim + 2 * groups * size], dt [tokens, heads], state, requests) -> float32 [tokens,
    heads * head_dim]: the scan of x by softplus(dt + bias), with the skip; for float32 decay [heads]."""
    heads = decay.shape[0]
    run, code = kernel("torchplug_ssd_scan", decay, dtype, size <= _MOST_STATE)
    if run is None:
        return None
    kept = (decay * _LOG2_E, bias.float(), skip.float())
    structure = _Heads(heads, head_dim, size, groups, *(tensor.data_ptr() for tensor in kept), *limit, code)

    def scan(
        xbc: Tensor,
        dt: Tensor,
        state: Tensor | None,
        requests: StepRequests,
        kept: object = (structure, kept),
    ) -> Tensor | None:
        tokens = requests.tokens
        if not _rows(xbc, dtype, tokens, heads * head_dim + 2 * groups * size) or not _rows(dt, dtype, tokens, heads):
            return None
        slots = _slots(state, (head_dim * size, size, 1))
        if slots is None:
            return None
        out = _empty(requests.tokens, heads * head_dim, dtype=torch.float32)
        failed = run(
            address, requests.address, *slots, xbc.data_ptr(), _row(xbc), dt.data_ptr(), _row(dt), out.data_ptr()
        )
        if failed:
            raise MemoryError("no memory for what a scan lays out")
        return out

    address = ctypes.addressof(structure)
    return scan


class _GatedNorm(ctypes.Structure):
    _fields_ = (("groups", c_int64), ("size", c_int64), ("eps", c_float), ("dtype", c_int))


GatedNorm = Callable[[Tensor, Tensor, Tensor], Tensor | None]


def gated_rms_norm(weight: Tensor, eps: float, groups: int) -> GatedNorm | None:
    """(x float32, gate, weight) -> [rows, size]: norm(x * silu(gate)) * weight, for weights like this one."""
    dtype, width = weight.dtype, weight.shape[0]
    run, code = kernel("torchplug_gated_rms_norm", weight, dtype)
    if run is None:
        return None
    structure = _GatedNorm(groups, width // groups, eps, code)

    def normalise(x: Tensor, gate: Tensor, weight: Tensor, kept: object = structure) -> Tensor | None:
        rows = x.shape[0]
        if not _rows(x, torch.float32, rows, width) or not _rows(gate, dtype, rows, width) or not x.is_contiguous():
            return None
        out = _empty(rows, width, dtype=dtype)
        run(
            address, weight.data_ptr(), x.data_ptr(), gate.data_ptr(), _row(gate), out.data_ptr(), rows, _threads()
        )  # fmt: skip
        return out

    address = ctypes.addressof(structure)
    return normalise


def _slots(state: Tensor | None, inner: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Address, bytes from slot to slot and dtype of a state whose other strides are `inner`; None where the kernel
    cannot read it."""
    if state is None:
        return 0, 0, 0
    code = CODES.get(state.dtype)
    first, *others = state.stride()
    if code is None or not state.is_cpu or tuple(others) != inner:
        return None
    return state.data_ptr(), first * state.element_size(), code


def _rows(x: Tensor, dtype: torch.dtype, *shape: int) -> bool:
    """Whether the kernel can read `x` row by row, as so many rows of so many columns."""
    return readable(x, dtype) and x.shape == shape and x.stride(1) == 1


def _row(x: Tensor) -> int:
    """Bytes from row to row."""
    return x.stride(0) * x.element_size()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _filled(size: int) -> int:
    return -(-size // _FILLED) * _FILLED
