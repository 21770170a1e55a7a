"""What a hook's result must look like: one test factory per kind of result.

A factory is run once per model, with what is known of the model, and gives the test that runs after every call: it
takes the result and returns None, or a text that says what was found instead. Tests look at type, rank, dtype and
device and never wait for the device. Torch is imported inside the factories, so that the hook table stays torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Test = Callable[[Any], "str | None"]


@dataclass(frozen=True, slots=True)
class Facts:
    """What result tests may know of a model. Both are None for a class that is not loaded."""

    device: torch.device | None = None
    dtype: torch.dtype | None = None


TestFactory = Callable[[Facts], Test]


def describe(value: Any) -> str:
    """A short text for an unexpected value: shapes, dtypes and devices for tensors, the type and a short repr
    otherwise.
    """
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "device"):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
    if isinstance(value, (list, tuple)) and value and len(value) <= 4:
        return f"{type(value).__name__} of ({', '.join(describe(item) for item in value)})"
    if value is None:
        return "None"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def embeddings(facts: Facts) -> Test:
    """[n, hidden] tensor of the model's dtype on the model's device."""
    import torch

    dtype, device = facts.dtype, facts.device
    on_cpu = device is not None and device.type == "cpu"

    def test(result: Any) -> str | None:
        if (
            isinstance(result, torch.Tensor)
            and result.dtype is dtype
            and result.dim() == 2
            and (result.is_cpu if on_cpu else result.device == device)
        ):
            return None
        return describe(result)

    return test


def multimodal_embeddings(facts: Facts) -> Test:
    """One [tokens, hidden] tensor per item (list or tuple), or one [items, tokens, hidden] tensor; floating, on the
    model's device.
    """
    import torch

    device = facts.device

    def test(result: Any) -> str | None:
        if isinstance(result, torch.Tensor):
            fits = result.dim() == 3 and result.is_floating_point() and result.device == device
            return None if fits else describe(result)
        if not isinstance(result, (list, tuple)):
            return describe(result)
        for index, item in enumerate(result):
            if not (
                isinstance(item, torch.Tensor)
                and item.dim() == 2
                and item.is_floating_point()
                and item.device == device
            ):
                return f"{describe(item)} for item {index}"
        return None

    return test


def module(facts: Facts) -> Test:
    """A torch.nn.Module."""
    from torch import nn

    return lambda result: None if isinstance(result, nn.Module) else describe(result)


def text_or_none(facts: Facts) -> Test:
    """A str, or None."""
    return lambda result: None if result is None or isinstance(result, str) else describe(result)


def mrope_positions(facts: Facts) -> Test:
    """(int64 [rows >= 3, n] tensor on the CPU, int)."""
    import torch

    def test(result: Any) -> str | None:
        if not (type(result) is tuple and len(result) == 2):
            return describe(result)
        positions, delta = result
        if (
            isinstance(positions, torch.Tensor)
            and positions.dtype is torch.int64
            and positions.dim() == 2
            and positions.shape[0] >= 3
            and positions.is_cpu
            and type(delta) is int
        ):
            return None
        return describe(result)

    return test


def state_shapes(facts: Facts) -> Test:
    """1 to 5 shapes, each a tuple of positive ints."""

    def test(result: Any) -> str | None:
        if not (type(result) is tuple and 1 <= len(result) <= 5):
            return describe(result)
        for index, shape in enumerate(result):
            if not (isinstance(shape, tuple) and shape and all(type(size) is int and size > 0 for size in shape)):
                return f"{describe(shape)} for state {index}"
        return None

    return test


def state_dtypes(facts: Facts) -> Test:
    """1 to 5 torch dtypes."""
    import torch

    def test(result: Any) -> str | None:
        fits = type(result) is tuple and 1 <= len(result) <= 5 and all(isinstance(d, torch.dtype) for d in result)
        return None if fits else describe(result)

    return test


def copy_functions(facts: Facts) -> Test:
    """1 to 5 callables."""

    def test(result: Any) -> str | None:
        fits = type(result) is tuple and 1 <= len(result) <= 5 and all(callable(function) for function in result)
        return None if fits else describe(result)

    return test


def layer_indices(facts: Facts) -> Test:
    """A tuple of ints, at least one, ascending and distinct."""

    def test(result: Any) -> str | None:
        fits = type(result) is tuple and result and all(type(index) is int for index in result)
        return None if fits and _ascending(result) else describe(result)

    return test


def _ascending(values: Sequence[int]) -> bool:
    return all(low < high for low, high in pairwise(values))
