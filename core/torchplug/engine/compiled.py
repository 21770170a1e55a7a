"""The forward pass through `torch.compile`: one graph of the whole model around opaque attention, for every batch size.

Sizes are symbols in the graph, but for a step of one token, which PyTorch always specialises: two compilations, both
made when the engine starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from torchplug.errors import DeviceError, PluginError, Problem

_SIZES: Final = (1, 3)
"""Tokens of the steps that are compiled: one, and any other number (2 is a head's usual share of some dimension)."""

_NO_COMPILER: Final = {"InvalidCxxCompiler", "CppCompileError", "CUDACompileError", "TritonMissing"}


class CompiledForward:
    """A module's forward pass, compiled.

    Args:
        module: The model, loaded with native kernels off (`CompilationConfig.mode`).
    """

    def __init__(self, module: nn.Module) -> None:
        from torchplug.layers.opaque import make_opaque

        make_opaque(module)
        self._name = type(module).__name__
        self._compiled: Callable[..., Any] = torch.compile(module, dynamic=True)

    def __call__(self, input_ids: Tensor | None, positions: Tensor, **others: Any) -> Tensor:
        return self._compiled(input_ids, positions, **others)  # type: ignore[no-any-return]

    def compile(self, inputs: Callable[[int], tuple[Tensor, Tensor]], progress: Callable[[int, int], None]) -> None:
        """Compile now, for all sizes, rather than in somebody's request. Under `torch.inference_mode()`.

        Args:
            inputs: Given a number of tokens, ids and positions as a step has them.
            progress: Called as progress(done, all).

        Raises:
            DeviceError: This machine has no compiler that torch.compile can use.
            PluginError: The model cannot be compiled.
        """
        import torch._dynamo

        # Other models of the process may have used up the compilations that PyTorch allows for one function; it would
        # go on without compiling.
        limits: dict[str, Any] = {"recompile_limit": 256, "accumulated_recompile_limit": 4096}
        try:
            with torch._dynamo.config.patch({**limits, "fail_on_recompile_limit_hit": True}):
                for done, size in enumerate(_SIZES):
                    progress(done, len(_SIZES))
                    self(*inputs(size))
        except Exception as error:
            raise self._explained(error) from error
        progress(len(_SIZES), len(_SIZES))

    def _explained(self, error: Exception) -> DeviceError | PluginError:
        for each in _chain(error):
            if type(each).__name__ in _NO_COMPILER:
                says = f"torch.compile finds no working compiler: {_first_line(each)}"
                fix = (
                    "install one (g++ on CPU, or name it in CXX; triton on CUDA), or leave out --compile (compile=True)"
                )
                return DeviceError("compiling", Problem(self._name, says, fix))
        says = f"torch.compile failed: {type(error).__name__}: {_first_line(error)}"
        return PluginError("compiling", Problem(self._name, says, "leave out --compile (compile=True)"))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and what it came from."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__, getattr(each, "inner_exception", None)]


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
