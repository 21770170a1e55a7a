"""The state-space scan of Mamba-2 (state space duality): chunks as matrix products, single tokens as an update.

Each head has one decay per token, so that inside a chunk the scan is a masked product like attention's, and from chunk
to chunk only the state is passed on. Source: Dao and Gu, Transformers are SSMs, 2024, section 6 (block decomposition)
and listing 1. All in float32.

Shapes: T tokens, H heads of size P, G groups of H / G heads that share B and C of size N.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchplug.layers.chunk_grid import ChunkGrid
from torchplug.layers.state_step import Sequences

CHUNK_SIZE = 64
"""Tokens per chunk: what measures best, whatever chunk a checkpoint was trained with; the result is the same."""


def ssd_update(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """One token of each request: `state` becomes exp(dt * decay) * state + dt * x b, in place; gives c's product with
    it.

    Args:
        x: [n, H, P].
        dt: [n, H], after softplus.
        decay: [H], negative.
        b: [n, G, N].
        c: [n, G, N].
        state: [n, H, P, N].

    Returns [n, H, P]; everything float32.
    """
    count, heads, size = x.shape
    groups, width = b.shape[1:]
    grouped = state.view(count, groups, -1, width)  # [n, G, H / G * P, N]
    state.mul_((dt * decay).exp_()[..., None, None])
    grouped.addcmul_((x * dt.unsqueeze(-1)).view(count, groups, -1, 1), b.unsqueeze(2))
    return torch.matmul(grouped, c.unsqueeze(-1)).view(count, heads, size)


def ssd_scan(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor, requests: Sequences
) -> tuple[Tensor, Tensor]:
    """Several tokens of each request, in chunks that start at the request's first token of this step.

    Args:
        x: [T, H, P].
        dt: [T, H], after softplus.
        decay: [H], negative.
        b: [T, G, N].
        c: [T, G, N].
        state: [requests, H, P, N], before the step.
        requests: Whose tokens they are.

    Returns the result [T, H, P] and the states after the step [requests, H, P, N]; everything float32.
    """
    grid = ChunkGrid(requests.lengths, CHUNK_SIZE)
    heads, size = x.shape[1:]
    groups, width = b.shape[1:]
    chunks, length = grid.chunks, grid.size
    per_group = heads // groups

    # Tokens that fill up a chunk have dt 0: they add nothing and let nothing decay.
    dt = grid.spread(dt)  # [chunks, length, H]
    b = grid.spread(b).transpose(1, 2)  # [chunks, G, length, N]
    c = grid.spread(c).transpose(1, 2)
    dx = grid.spread(x) * dt.unsqueeze(-1)  # [chunks, length, H, P]
    # How far each token has decayed at a later one, [chunks, H, length, length], summed from the token on: differences
    # of sums from the chunk's start lose what lies between neighbours when the sums are large.
    exponents = (dt * decay).transpose(1, 2)  # [chunks, H, length]
    places = torch.arange(length, device=x.device)
    later = places.unsqueeze(1) > places
    between = torch.where(later, exponents.unsqueeze(-1), 0.0).cumsum(-2)
    since_start = exponents.cumsum(-1).exp_().transpose(1, 2)  # [chunks, length, H]
    until_end = between[:, :, -1].exp().transpose(1, 2)

    # What each chunk adds to the state by its end, [chunks, G, N, H / G * P].
    kept = (dx * until_end.unsqueeze(-1)).view(chunks, length, groups, -1).transpose(1, 2)
    added = torch.matmul(b.transpose(2, 3), kept).view(chunks, groups, width, per_group, size)
    before, after = _pass_on(added, since_start[:, -1].reshape(chunks, groups, 1, per_group, 1), state, grid, groups)

    # From the state before the chunk, [chunks, G, length, H / G * P].
    out = torch.matmul(c, before.view(chunks, groups, width, -1))
    out = out.transpose(1, 2).reshape(chunks, length, heads, size).mul_(since_start.unsqueeze(-1))
    # From the chunk's own tokens: [chunks, H, length, length] weights.
    weights = between.exp_().tril_()
    scores = torch.matmul(c, b.transpose(2, 3))  # [chunks, G, length, length]
    weights.view(chunks, groups, per_group, length, length).mul_(scores.unsqueeze(2))
    out += torch.matmul(weights, dx.transpose(1, 2)).transpose(1, 2)
    return grid.gather(out), after


def _pass_on(added: Tensor, decay: Tensor, state: Tensor, grid: ChunkGrid, groups: int) -> tuple[Tensor, Tensor]:
    """The state before each chunk, [chunks, G, N, H / G, P], and after each request, [requests, H, P, N]."""
    count, heads, size, width = state.shape
    first = state.view(count, groups, heads // groups, size, width).permute(0, 1, 4, 2, 3)
    before = torch.empty_like(added)
    after = torch.empty_like(state)
    last = after.view(first.permute(0, 1, 3, 4, 2).shape).permute(0, 1, 4, 2, 3)
    chunk = 0
    for request, chunks in enumerate(grid.chunks_of):
        before[chunk].copy_(first[request])
        for place in range(chunk, chunk + chunks):
            target = last[request] if place == chunk + chunks - 1 else before[place + 1]
            torch.addcmul(added[place], before[place], decay[place], out=target)
        chunk += chunks
    return before, after
