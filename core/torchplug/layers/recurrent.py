"""What the engine must know of a layer that carries a state from token to token.

A recurrent layer (a state-space scan, a short convolution, linear attention) keeps a fixed number of values per
request instead of keys and values per token. The engine owns them, one slot per request in tensors that it sets as
`state`, and says in the forward context which slot belongs to which request. The layer itself never learns of
requests that come, go or share a prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RecurrentLayer(nn.Module):
    """Base of layers with a state; a subclass answers the two questions and reads and writes `state` in `forward`.

    In `forward`, request i of the step (tokens `query_start_loc[i]` to `query_start_loc[i + 1]` of the flat batch)
    continues from slot `state_slots[i]` of every tensor in `state` where it has tokens before this step
    (`seq_lens[i]` > its new tokens), starts from zero where it has none, and leaves its new state in that slot. What a
    slot holds before a request's first token is undefined, NaN included. A slot of -1 marks a padding row: no slot may
    be read or written for it.

    Without a context the batch is one sequence from position 0 whose state is not kept; `state` None with a context
    means that every request is new in this step and none is kept.

    Attributes:
        state: Set by the engine: one tensor [num_slots, *shape] for each of `state_shapes()`, model device; None until
            then.
    """

    state: tuple[Tensor, ...] | None

    def __init__(self) -> None:
        super().__init__()
        self.state = None

    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each state tensor of one request, in the order of `state`, for this tensor-parallel rank."""
        raise NotImplementedError(f"{type(self).__name__} must say which state it keeps: implement state_shapes()")

    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype of each state tensor, in the same order."""
        raise NotImplementedError(f"{type(self).__name__} must say which state it keeps: implement state_dtypes()")
