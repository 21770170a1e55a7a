"""What the CUDA path needs of a device, on CPU: a kernel that checks every argument, and graphs that replay a tape.

`varlen_attn` stands for PyTorch's function of that name in flash attention 2's form: it computes what its documentation
says, in plain PyTorch, and asserts what the kernel asserts or takes for granted. `TapeDevice` records the operators
that a function runs and replays them over the same memory, as a CUDA graph does: no Python runs again, and whatever
Python decided while it was recorded stays.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchplug.engine import kv_cache, llm_engine, runner
from torchplug.layers.attention_backend import BackendChoice
from torchplug.layers.varlen import VarlenBackend

PAGE = 256
_dtypes = [torch.float16, torch.bfloat16]


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    left, right = window_size
    assert enable_gqa and num_splits == 1
    return torch.ops.torchplug_test.varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, left, right, seqused_k, block_table
    )


@torch.library.custom_op("torchplug_test::varlen_attn", mutates_args=())
def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    left: int,
    right: int,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    (tokens, heads, size), (pages, page, kv_heads, _) = query.shape, key.shape
    requests = len(seqused_k)
    for tensor in (query, key, value):
        assert tensor.dtype in _dtypes and tensor.dtype == query.dtype and tensor.device == query.device
        assert tensor.stride(-1) == 1 and tensor.shape[-1] == size
    for tensor, shape in (
        (cu_seq_q, (requests + 1,)),
        (cu_seq_k, (requests + 1,)),
        (seqused_k, (requests,)),
        (block_table, (requests, block_table.shape[1])),
    ):
        assert tensor.dtype == torch.int32 and tensor.device == query.device
        assert tensor.shape == shape and tensor.is_contiguous()
    assert size % 8 == 0 and size <= 256 and heads % kv_heads == 0
    assert page % PAGE == 0 and key.shape == value.shape and key.is_contiguous() and value.is_contiguous()
    starts, lengths = cu_seq_q.tolist(), seqused_k.tolist()
    new = [stop - start for start, stop in pairwise(starts)]
    assert (
        starts[0] == 0
        and starts[-1] == tokens
        and all(0 <= n <= length for n, length in zip(new, lengths, strict=True))
    )
    assert cu_seq_k.tolist() == [0, *seqused_k.cumsum(0).tolist()]
    assert max(new) <= max_q and (max_q > 1 or min(new) == 1)
    assert max(lengths) <= max_k <= block_table.shape[1] * page
    result = torch.full_like(query, float("nan"))
    for request, length in enumerate(lengths):
        blocks = block_table[request, : -(-length // page)].long()
        assert all(0 <= block < pages for block in blocks.tolist())
        keys = key[blocks].flatten(0, 1)[:length].float()
        values = value[blocks].flatten(0, 1)[:length].float()
        rows = query[starts[request] : starts[request + 1]].float().view(-1, kv_heads, heads // kv_heads, size)
        scores = torch.einsum("qhgd,khd->hgqk", rows, keys) * scale
        here = torch.arange(length - new[request], length)[:, None]
        places = torch.arange(length)
        hidden = torch.zeros(new[request], length, dtype=torch.bool)
        if left >= 0:
            hidden |= places < here - left
        if right >= 0:
            hidden |= places > here + right
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        # Masked keys have no weight and may hold anything: the kernel never multiplies by what it has not loaded.
        seen = torch.einsum("hgqk,khd->qhgd", weights, values)
        result[starts[request] : starts[request + 1]] = seen.reshape(-1, heads, size).to(query.dtype)
    return result


@contextmanager
def float32_too():
    """The kernel takes float32 as well, which the real one does not: then its tokens can be compared with those of
    another backend without ties of rounding."""
    _dtypes.append(torch.float32)
    try:
        yield
    finally:
        _dtypes.remove(torch.float32)


_aten = torch.ops.aten
_WAIT = {_aten.item.default, _aten._local_scalar_dense.default, _aten.is_nonzero.default, _aten.nonzero.default}


class _Tape(TorchDispatchMode):
    """The operators of a function, with the tensors that they took and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in _WAIT:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = function(*args, **(kwargs or {}))
        self.entries.append((function, args, kwargs or {}, result))
        return result


class TapeGraph:
    def __init__(self, device, entries, output):
        self.output = output
        self._device, self._entries = device, entries

    def replay(self):
        self._device.log("replay", len(self.output))
        for function, args, kwargs, result in self._entries:
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeDevice:
    """A GraphDevice. `journal` holds what happened to it, and to the buffers of `separate_buffers`, in order."""

    def __init__(self):
        self.journal = []
        self.fail_at = None

    def log(self, what, size):
        self.journal.append((what, size))

    def warm_up(self, run):
        with _Tape():
            self.log("warm up", len(run()))

    def capture(self, run):
        if self.fail_at == sum(what == "capture" for what, _ in self.journal):
            raise torch.OutOfMemoryError("CUDA out of memory")
        tape = _Tape()
        with tape:
            output = run()
        self.log("capture", len(output))
        return TapeGraph(self, tape.entries, output)

    def used_bytes(self):
        return 1000 * sum(what == "capture" for what, _ in self.journal)


def _choose(head_size, cache_dtype, dtype, device):
    return BackendChoice(VarlenBackend(varlen_attn))


def use_varlen(monkeypatch):
    """Every model of the engine attends by the kernel above."""
    monkeypatch.setattr(kv_cache, "choose_backend", _choose)


def use_tapes(monkeypatch):
    """Every engine records tapes; returns the device of the next one. Its buffers have copies apart from the host's, as
    on a device, filled with what would break an index until they are written."""
    device = TapeDevice()

    class Staged(runner._Staged):
        def __init__(self, size, dtype, where):
            super().__init__(size, dtype, where)
            self._copy = torch.full((size,), 1 << 30, dtype=dtype)

        def on_device(self, size):
            device.log("copy", size)
            return super().on_device(size)

    monkeypatch.setattr(runner, "_Staged", Staged)
    monkeypatch.setattr(llm_engine, "graph_device", lambda where: device)
    return device


def check_alike(found, expected, tolerance):
    """Equal up to rounding: log-probabilities are close until a token differs, which it may only at a tie."""
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        for (token, entries), (other, others) in zip(answer, found[name], strict=True):
            best, second = sorted((each.logprob for each in entries.values()), reverse=True)[:2]
            if token != other:
                assert best - second < tolerance, f"{name}: {token} and {other} are no tie"
                break
            assert abs(entries[token].logprob - others[token].logprob) < tolerance, name
