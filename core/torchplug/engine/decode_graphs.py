"""CUDA graphs of the decode step: the kernels of a forward pass over one token per request, recorded once and replayed.

A decode step launches hundreds of small kernels, and launching them takes the host longer than the device needs to run
them. A graph launches all of them at once. It is recorded for a few batch sizes; a step takes the next larger one and
fills it up with padding rows. What a graph reads lies at the same addresses for ever: the caller fills those buffers
before it replays. Sampling, and whatever reads lengths on the host, stays outside.

The order of warm-up, recording and replay, and what is forbidden in between, is that of PyTorch's notes on CUDA graphs
(`torch.cuda.graph`).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from torchplug.layers.recurrent import RecurrentLayer

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


class Graph(Protocol):
    """A recorded forward pass. `output` is where each replay leaves its result."""

    output: Tensor

    def replay(self) -> None:
        """Run the recorded kernels again, over what their buffers hold now."""


class GraphDevice(Protocol):
    """What a device must be able to do to record and replay."""

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        """Call `run` as a recording would, so that nothing is initialised or chosen while one is made. It raises where
        `run` waits for the device, which would spoil a recording."""

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        """Record the kernels that `run` launches."""

    def used_bytes(self) -> int:
        """Memory of the device that is taken, by whomever."""


class CudaGraphDevice:
    """CUDA. All graphs of one such object share a memory pool, since no two run at once.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        """On the stream that records, since libraries keep workspaces for each stream. A second time with PyTorch's
        check for operators that wait: after a recording that one of them has spoilt, its allocator is left in a state
        meant for recordings."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            before = torch.cuda.get_sync_debug_mode()
            try:
                with torch.cuda.stream(self._stream):
                    run()
                    torch.cuda.set_sync_debug_mode("error")
                    run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
                current.wait_stream(self._stream)

    def capture(self, run: Callable[[], Tensor]) -> Graph:
        """Record `run`; the current stream is the same afterwards, whatever happens."""
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(torch.cuda.current_stream()),  # a recording that fails leaves its own stream in place
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
        ):
            output = run()
        return _CudaGraph(graph, output)

    def used_bytes(self) -> int:
        """Of the whole device: instantiated graphs take memory outside of PyTorch's allocator too."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self.output = output
        self.replay = graph.replay


def graph_device(device: torch.device) -> GraphDevice | None:
    """Who records on `device`; None where nobody can."""
    return CudaGraphDevice(device) if device.type == "cuda" else None


def why_not_recorded(module: nn.Module) -> str | None:
    """What in a module rules out a graph of it; None where nothing does that can be known beforehand."""
    for name, part in module.named_modules():
        if isinstance(part, RecurrentLayer):
            return f"layer {name!r} is recurrent"
        if part._forward_hooks or part._forward_pre_hooks:
            return f"layer {name!r} has forward hooks, which a replay would not call"
    return None


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to and including `max_num_seqs`: at most half of a step is padding."""
    powers = [1 << exponent for exponent in range(max_num_seqs.bit_length()) if 1 << exponent < max_num_seqs]
    return (*powers, max_num_seqs)


class DecodeGraphs:
    """A graph of the decode step for each of some batch sizes.

    Args:
        device: Records and replays.
        max_num_seqs: Most requests in a step.

    Attributes:
        sizes: Batch sizes that are recorded, ascending.
        num_bytes: What all graphs take on the device.
        reason: Why there are none, once `capture` has failed.
    """

    def __init__(self, device: GraphDevice, max_num_seqs: int) -> None:
        self.sizes: Sequence[int] = batch_sizes(max_num_seqs)
        self.num_bytes = 0
        self.reason = ""
        self._device = device
        self._graphs: dict[int, Graph] = {}

    def capture(self, prepare: Callable[[int], Callable[[], Tensor]], progress: Progress) -> None:
        """Record every size. A model that cannot be recorded (it reads values on the host, or memory is short) runs
        eagerly: then `reason` says why, and nothing is recorded.

        Args:
            prepare: Given a batch size, fills the buffers with padding rows and returns the forward pass over them.
            progress: Called as progress(recorded, all).
        """
        before = self._device.used_bytes()
        graphs: dict[int, Graph] = {}
        try:
            # The largest first: the smaller ones then find room in the pool that it has filled.
            for done, size in enumerate(reversed(self.sizes)):
                progress(done, len(self.sizes))
                run = prepare(size)
                self._device.warm_up(run)
                graphs[size] = self._device.capture(run)
        except Exception as error:  # whatever a model does that a recording does not allow
            self.reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            _log.warning("decode steps run without CUDA graphs: %s", self.reason, exc_info=error)
            return
        progress(len(self.sizes), len(self.sizes))
        self._graphs = graphs
        self.num_bytes = self._device.used_bytes() - before

    def size_for(self, num_requests: int) -> int | None:
        """The recorded batch size for so many requests; None where nothing is recorded."""
        if not self._graphs:
            return None
        return self.sizes[bisect_left(self.sizes, num_requests)]

    def replay(self, size: int) -> Tensor:
        """Hidden states of a step of that size, whose buffers are filled. Valid until the next replay of any size."""
        graph = self._graphs[size]
        graph.replay()
        return graph.output

    def close(self) -> None:
        """Let go of the graphs and their memory."""
        self._graphs.clear()
