"""The selective scan of Mamba-1: a decay of its own for every channel and state, for every token.

h[t] = exp(dt[t] * decay) * h[t - 1] + dt[t] * x[t] * b[t] and y[t] = sum over the state of c[t] * h[t]. Source: Gu and
Dao, Mamba, 2023, section 3.2 and algorithm 2 (zero-order hold for the decay, Euler for b). All in float32.

Shapes: T tokens, I channels, N the size of a channel's state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchplug.layers.chunk_grid import ChunkGrid
from torchplug.layers.state_step import Sequences

CHUNK_SIZE = 16
"""Positions that are looped over; at each, a block of chunks is advanced at once."""

_AT_ONCE = 4
"""Chunks in a block: more leave the processor's cache, fewer cost more calls."""


def selective_update(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """One token of each request; `state` is advanced in place.

    Args:
        x: [n, I].
        dt: [n, I], after softplus.
        decay: [I, N], negative.
        b: [n, N].
        c: [n, N].
        state: [n, I, N].

    Returns [n, I]; everything float32.
    """
    state.mul_((dt.unsqueeze(-1) * decay).exp_()).addcmul_((dt * x).unsqueeze(-1), b.unsqueeze(1))
    return torch.matmul(state, c.unsqueeze(-1)).squeeze(-1)


def selective_scan(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor, requests: Sequences
) -> tuple[Tensor, Tensor]:
    """Several tokens of each request.

    Every chunk is scanned from zero first, which gives what it adds to the state; the states before the chunks follow,
    one chunk after another; then all chunks are scanned from there. No exponent is positive.

    Args:
        x: [T, I].
        dt: [T, I], after softplus.
        decay: [I, N], negative.
        b: [T, N].
        c: [T, N].
        state: [requests, I, N], before the step.
        requests: Whose tokens they are.

    Returns the result [T, I] and the states after the step [requests, I, N]; everything float32.
    """
    grid = ChunkGrid(requests.lengths, CHUNK_SIZE)
    # Tokens that fill up a chunk have dt 0: they add nothing and let nothing decay.
    dx, dt, b, c = (grid.spread(y) for y in (dt * x, dt, b, c))
    out = torch.empty_like(dx)
    # Channels last, which are many: N apart, every product would be of a few numbers.
    decay = decay.t().contiguous()
    after = state.transpose(1, 2).contiguous()  # [requests, N, I]
    owners = [request for request, chunks in enumerate(grid.chunks_of) for _ in range(chunks)]
    for start in range(0, grid.chunks, _AT_ONCE):
        block = slice(start, start + _AT_ONCE)
        decays = (dt[block].unsqueeze(2) * decay).exp_()  # [block, size, N, I]
        states = dx[block].unsqueeze(2) * b[block].unsqueeze(3)
        added = torch.zeros_like(states[:, 0])
        for place in range(grid.size):
            torch.addcmul(states[:, place], added, decays[:, place], out=added)
        whole = (dt[block].sum(1).unsqueeze(1) * decay).exp_()
        before = torch.empty_like(added)
        for chunk, owner in enumerate(owners[block]):
            before[chunk] = after[owner]
            torch.addcmul(added[chunk], after[owner], whole[chunk], out=after[owner])
        for place in range(grid.size):
            torch.addcmul(states[:, place], before, decays[:, place], out=states[:, place])
            before = states[:, place]
        out[block] = torch.matmul(c[block].unsqueeze(2), states).squeeze(2)
    return grid.gather(out), after.transpose(1, 2)
