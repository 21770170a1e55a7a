"""Traces of expert load: recorded ones in a file, and synthetic ones of a chosen skew and drift.

The file is a safetensors file with one integer tensor `expert_load` [steps, layers, logical], the tokens of each expert
in each step over all ranks, and the metadata `{"format": "torchplug.expert_load.v1"}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from torchplug.errors import Problem, RequestError

FORMAT: Final = "torchplug.expert_load.v1"
TENSOR: Final = "expert_load"


class LoadTrace(Protocol):
    """Steps of expert load that can be read once, some at a time."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, layers and logical experts."""

    def chunks(self, size: int) -> Iterator[NDArray[Any]]:
        """The steps in order, `size` at a time: integers [steps, layers, logical]; the last part may be shorter."""


def save_load_trace(path: str | Path, load: NDArray[np.integer[Any]]) -> None:
    """Write a trace. `load`: integers [steps, layers, logical], e.g. `EplbState.local_loads()` of a run."""
    from safetensors.numpy import save_file

    save_file({TENSOR: np.ascontiguousarray(load)}, str(path), {"format": FORMAT})


class RecordedTrace:
    """A trace in a file.

    Raises:
        RequestError: The file is missing, is no such trace, is empty, or has negative numbers (when they are read).
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            with safe_open(str(path), framework="np") as file:
                if TENSOR not in file.keys():  # noqa: SIM118  (it is no mapping)
                    raise self._error(f"has no tensor {TENSOR!r}")
                part = file.get_slice(TENSOR)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
        except (OSError, SafetensorError) as error:
            raise self._error(f"cannot be read: {error}") from None
        if len(shape) != 3 or not all(shape) or dtype[0] not in "IU":
            raise self._error(f"expected integers [steps, layers, experts] and not empty, found {dtype} {list(shape)}")
        self._shape: tuple[int, int, int] = shape

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, layers and logical experts."""
        return self._shape

    def chunks(self, size: int) -> Iterator[NDArray[Any]]:
        """See `LoadTrace`."""
        from safetensors import safe_open

        with safe_open(str(self.path), framework="np") as file:
            part = file.get_slice(TENSOR)
            for start in range(0, self._shape[0], size):
                load = part[start : min(start + size, self._shape[0])]
                if load.min() < 0:
                    raise self._error(f"has a negative load within steps {start} to {start + len(load) - 1}")
                yield load

    def _error(self, says: str) -> RequestError:
        fix = f"write it with torchplug.engine.load_trace.save_load_trace (safetensors, tensor {TENSOR!r})"
        return RequestError("trace of expert load", Problem(str(self.path), says, fix))


@dataclass(frozen=True, slots=True)
class SyntheticTrace:
    """Load whose experts follow a power law and drift.

    Expert number n of a layer, in a random order, is asked for in proportion to `n ** -skew`; in each step the
    logarithm of every expert's popularity makes a random step of standard deviation `drift`. No expert is expected to
    get more than one pick of a token, as with a router that picks different experts. Every step has exactly
    `tokens * top_k` picks in each layer.

    Attributes:
        num_steps, num_layers, num_experts: The shape.
        tokens: Of a step, over all ranks.
        top_k: Experts of a token.
        skew: Exponent; 0 is even.
        drift: Per step.
        seed: Of the random numbers.
    """

    num_steps: int
    num_layers: int
    num_experts: int
    tokens: int = 4096
    top_k: int = 8
    skew: float = 1.0
    drift: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            says = f"a token cannot have {self.top_k} different ones of {self.num_experts} experts"
            raise RequestError("synthetic load", Problem("top_k", says, f"use at most {self.num_experts}"))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, layers and logical experts."""
        return self.num_steps, self.num_layers, self.num_experts

    def chunks(self, size: int) -> Iterator[NDArray[Any]]:
        """See `LoadTrace`."""
        rng = np.random.default_rng(self.seed)
        law = -self.skew * np.log(np.arange(1, self.num_experts + 1))
        popularity = np.stack([rng.permutation(law) for _ in range(self.num_layers)])
        for start in range(0, self.num_steps, size):
            steps = min(size, self.num_steps - start)
            load = np.empty((steps, self.num_layers, self.num_experts), np.int32)
            for step in range(steps):
                load[step] = rng.multinomial(self.tokens * self.top_k, self._chances(popularity))
                popularity = popularity + self.drift * rng.standard_normal(popularity.shape)
            yield load

    def _chances(self, popularity: NDArray[np.float64]) -> NDArray[np.float64]:
        weight = np.exp(popularity - popularity.max(1, keepdims=True))
        chance = weight / weight.sum(1, keepdims=True)
        most = 1 / self.top_k
        # What is cut off goes to the others, in proportion; some of them may then be cut off too.
        while (chance > most * (1 + 1e-9)).any():
            full = chance >= most * (1 - 1e-12)
            rest = np.where(full, 0, weight)
            total = rest.sum(1, keepdims=True)
            left = 1 - most * full.sum(1, keepdims=True)
            chance = np.where(full, most, rest * left / np.where(total > 0, total, 1))
        normalised: NDArray[np.float64] = chance / chance.sum(1, keepdims=True)
        return normalised
