"""ggml's tensor types: how many bytes a block takes in a GGUF file, and what values its bytes stand for.

The commonest types are dequantised by a few torch operations here, everything else by the `gguf` package (extra
`torchplug[gguf]`), whose `gguf.quants` is also the reference that the tests hold the torch operations to, bit by bit.
Block layouts: ggml's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchplug.errors import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Values dequantised at a time: 1 MiB of float32 stays in a core's cache and bounds the memory beyond the tensor itself.
_CHUNK = 2**18


@dataclass(frozen=True, slots=True)
class GgmlType:
    """`block` values in `nbytes` bytes; `plain` is the torch dtype's name where the values are stored as they are."""

    id: int
    name: str
    block: int
    nbytes: int
    plain: str | None = None


TYPES: dict[int, GgmlType] = {
    kind.id: kind
    for kind in (
        GgmlType(0, "F32", 1, 4, "float32"),
        GgmlType(1, "F16", 1, 2, "float16"),
        GgmlType(2, "Q4_0", 32, 18),
        GgmlType(3, "Q4_1", 32, 20),
        GgmlType(6, "Q5_0", 32, 22),
        GgmlType(7, "Q5_1", 32, 24),
        GgmlType(8, "Q8_0", 32, 34),
        GgmlType(9, "Q8_1", 32, 40),
        GgmlType(10, "Q2_K", 256, 84),
        GgmlType(11, "Q3_K", 256, 110),
        GgmlType(12, "Q4_K", 256, 144),
        GgmlType(13, "Q5_K", 256, 176),
        GgmlType(14, "Q6_K", 256, 210),
        GgmlType(15, "Q8_K", 256, 292),
        GgmlType(16, "IQ2_XXS", 256, 66),
        GgmlType(17, "IQ2_XS", 256, 74),
        GgmlType(18, "IQ3_XXS", 256, 98),
        GgmlType(19, "IQ1_S", 256, 50),
        GgmlType(20, "IQ4_NL", 32, 18),
        GgmlType(21, "IQ3_S", 256, 110),
        GgmlType(22, "IQ2_S", 256, 82),
        GgmlType(23, "IQ4_XS", 256, 136),
        GgmlType(24, "I8", 1, 1, "int8"),
        GgmlType(25, "I16", 1, 2, "int16"),
        GgmlType(26, "I32", 1, 4, "int32"),
        GgmlType(27, "I64", 1, 8, "int64"),
        GgmlType(28, "F64", 1, 8, "float64"),
        GgmlType(29, "IQ1_M", 256, 56),
        GgmlType(30, "BF16", 1, 2, "bfloat16"),
        GgmlType(34, "TQ1_0", 256, 54),
        GgmlType(35, "TQ2_0", 256, 66),
        GgmlType(39, "MXFP4", 32, 17),
        GgmlType(40, "NVFP4", 64, 36),
        GgmlType(41, "Q1_0", 128, 18),
    )
}


def undequantisable(kinds: Iterable[GgmlType], where: str) -> list[Problem]:
    """A Problem for each of `kinds` that cannot be turned into values in this environment; empty when all can."""
    others = [kind for kind in kinds if kind.plain is None and kind.name not in _TORCH_KERNELS]
    if not others:
        return []
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        names = ", ".join(sorted(kind.name for kind in others))
        says = f"its {names} tensors are dequantised by the package gguf, which is not installed"
        return [Problem(where, says, 'pip install "torchplug[gguf]"')]
    import numpy

    problems = []
    for kind in others:
        try:
            quants.dequantize(numpy.zeros((1, kind.nbytes), numpy.uint8), GGMLQuantizationType(kind.id))
        except (NotImplementedError, ValueError):
            says = f"the installed gguf package cannot dequantise type {kind.name}"
            problems.append(
                Problem(where, says, 'pip install -U gguf, or requantise the file to one that it can, e.g. "Q8_0"')
            )
    return problems


def dequantise(raw: Tensor, kind: GgmlType, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The values of one tensor.

    Args:
        raw: uint8 [nbytes], CPU; the tensor's blocks as they lie in the file. Not written to.
        kind: Its type; one for which `undequantisable` has no complaint.
        shape: Its shape in torch order; the last dimension is a whole number of blocks.
        dtype: Wanted dtype of floating-point values; integers keep theirs. Rounded once, from float32.

    Returns:
        A tensor of `shape` on the CPU; a view of `raw` where nothing had to be converted.
    """
    import torch

    if kind.plain is not None:
        stored = raw.view(getattr(torch, kind.plain)).view(tuple(shape))
        return stored.to(dtype) if stored.is_floating_point() else stored
    kernel = _TORCH_KERNELS.get(kind.name) or _reference_kernel(kind)
    blocks = raw.view(-1, kind.nbytes)
    values = torch.empty(tuple(shape), dtype=dtype)
    flat = values.view(-1, kind.block)
    step = _CHUNK // kind.block
    for first in range(0, len(blocks), step):
        flat[first : first + step] = kernel(blocks[first : first + step])
    return values


def _reference_kernel(kind: GgmlType) -> Callable[[Tensor], Tensor]:
    import torch
    from gguf import GGMLQuantizationType, quants

    ggml_type = GGMLQuantizationType(kind.id)

    def kernel(blocks: Tensor) -> Tensor:
        # One row for all blocks: gguf.quants walks rows in groups of 16, and its cost is per group.
        values = quants.dequantize(blocks.numpy().reshape(1, -1), ggml_type)
        return torch.from_numpy(values).view(len(blocks), kind.block)

    return kernel


def _halves(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """`count` float16 numbers from byte `first` of each block, as float32 [blocks, count]."""
    import torch

    return blocks[:, first : first + 2 * count].contiguous().view(torch.float16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    import torch

    nibbles = blocks[:, 2:]
    values = torch.cat((nibbles & 15, nibbles >> 4), 1).float()
    return values.sub_(8).mul_(_halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    import torch

    nibbles = blocks[:, 4:]
    scale = _halves(blocks, 0, 2)
    values = torch.cat((nibbles & 15, nibbles >> 4), 1).float()
    return values.mul_(scale[:, :1]).add_(scale[:, 1:])


def _q8_0(blocks: Tensor) -> Tensor:
    import torch

    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks, 0))


def _q4_k(blocks: Tensor) -> Tensor:
    """256 values in 8 groups of 32; bytes 4 to 15 hold each group's scale and minimum, of 6 bits."""
    import torch

    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), 1).float().mul_(_halves(blocks, 0))
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), 1).float().mul_(_halves(blocks, 2))
    nibbles = blocks[:, 16:].view(-1, 4, 1, 32)
    values = torch.cat((nibbles & 15, nibbles >> 4), 2).float().view(-1, 8, 32)
    return values.mul_(scales[:, :, None]).sub_(minima[:, :, None]).view(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    """256 values of 6 bits: 128 bytes of low nibbles, 64 bytes of high pairs, 16 signed scales, one float16."""
    import torch

    low = blocks[:, :128].view(-1, 2, 1, 64)
    high = blocks[:, 128:192].view(-1, 2, 1, 32)
    low = torch.cat((low & 15, low >> 4), 2).view(-1, 8, 32)
    high = torch.cat((high & 3, (high >> 2) & 3, (high >> 4) & 3, high >> 6), 2).view(-1, 8, 32)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_halves(blocks, 208))
    values = (low | (high << 4)).float().sub_(32).view(-1, 16, 16)
    return values.mul_(scales[:, :, None]).view(-1, 256)


_TORCH_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
