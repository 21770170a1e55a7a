"""What layers may know of a step: the flat batch of the forward pass in progress.

A step is a flat batch: the tokens of all requests, one request after another. The runner publishes its layout here;
layers read it and never see the scheduler. With no context, a forward pass is one sequence from position 0 without a
cache, which is what an author's own test and a profile run want.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from torch import Tensor


class VaryingHostValues(tuple[Any, ...]):
    """What a context holds on the host's side while the kernels of a step are recorded for replay: nothing.

    A recording is replayed for steps with other lengths and other blocks. What Python read while it was made would be
    right for one of them and silently wrong for the others, so reading is an error: the model is not recorded then.
    """

    __slots__ = ()

    def _refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(
            "the lengths and block tables of a step are read on the host, and differ each time that the recorded step "
            "is replayed"
        )

    __iter__ = __len__ = __getitem__ = __contains__ = __eq__ = __ne__ = __lt__ = __hash__ = __bool__ = _refuse


VARYING: Final = VaryingHostValues()


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the layers of one cache group keep this step's tokens; the attributes are those of `ForwardContext`."""

    slot_mapping: Tensor
    block_tables: Tensor
    block_tables_host: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Layout of one step over `num_reqs` requests and `num_tokens` tokens. Tensors are on the model's device.

    While a step is recorded as a CUDA graph, `seq_lens_host`, `block_tables_host` and `state_slots_host` cannot be read
    (`VaryingHostValues`), every request has one new token, and rows past the step's requests are padding: their tokens
    go to a block of no request.

    Attributes:
        query_start_loc: int32 [num_reqs + 1], offset of each request's first token in the flat batch, then num_tokens.
        seq_lens: int32 [num_reqs], tokens of each request after this step (cached + new).
        slot_mapping: int64 [num_tokens], flat cache slot (block id * block_size + offset) that each token's key and
            value go to.
        block_tables: int32 [num_reqs, max_blocks], block ids of each request in order; entries past a
            request's length, and those that a sliding window has left behind, mean nothing.
        block_size: Tokens per block.
        query_lens_host: New tokens of each request, on the host, for backends that loop over requests.
        seq_lens_host: `seq_lens` on the host.
        block_tables_host: Block ids of each request, on the host.
        more_groups: In a model whose layers have different sliding windows, the layouts of the cache groups after the
            first, which is the one here.
        state_slots: int64 [num_reqs], the slot of each request in the state tensors of recurrent layers, -1 for a
            padding row; None in a model without such layers.
        state_slots_host: The same on the host.
        num_padding_tokens: Rows at the end of the flat batch that belong to no request, for layers that count tokens;
            a recorded step does not say.
        record_expert_load: Whether mixture-of-experts layers count this step's tokens for the load balancer; False for
            a dummy step.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    block_size: int
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]
    block_tables_host: tuple[tuple[int, ...], ...]
    more_groups: tuple[BlockLayout, ...] = ()
    state_slots: Tensor | None = None
    state_slots_host: tuple[int, ...] = ()
    num_padding_tokens: int = 0
    record_expert_load: bool = True


class _Current(threading.local):
    context: ForwardContext | None = None


_current = _Current()


def get_forward_context() -> ForwardContext | None:
    """The layout of the step in progress on this thread, or None outside of one."""
    return _current.context


@contextmanager
def set_forward_context(context: ForwardContext | None) -> Iterator[None]:
    """Publish `context` to the layers for the duration of one forward pass."""
    previous = _current.context
    _current.context = context
    try:
        yield
    finally:
        _current.context = previous
