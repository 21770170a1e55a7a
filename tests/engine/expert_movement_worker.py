"""One rank of tests/engine/test_expert_movement.py: SCENARIO NUM_RANKS STORE RANK; prints one line of JSON."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta

import numpy as np
import torch
from torch import distributed as dist
from torchplug.engine.eplb_state import EplbState
from torchplug.engine.expert_balancer import ExpertBalancer
from torchplug.engine.expert_movement import bytes_of_expert, move_layer, plan_of_rank, plan_transfers
from torchplug.engine.expert_placement import ExpertLayout
from torchplug.errors import DistributedError


def rows_of(experts, layer=0):
    """The rows of experts in a layer, in several dtypes and ranks; what a slot holds can be told from them."""
    number = torch.as_tensor(experts)[:, None] + 100.0 * layer
    wide = (number * torch.arange(1, 7)).view(-1, 2, 3)
    return [wide.clone(), number.to(torch.bfloat16), number[:, 0].clone(), number.to(torch.int8).to(torch.uint8)]


def wrong(tensors, experts, layer=0):
    return sum(not torch.equal(*pair) for pair in zip(tensors, rows_of(experts, layer), strict=True))


def move(tensors, old, new, layout, rank, group=None):
    move_layer(tensors, plan_of_rank(plan_transfers(old, new, layout), old, new, layout, rank), group)


def local(slots, layout, rank):
    size = layout.num_local_physical
    return slots[rank * size : (rank + 1) * size]


def moves(rank, num_ranks, pair):
    found = {"rank": rank, "moves": 0, "wrong": 0, "pair_moves": 0}
    layout, draw = ExpertLayout(6, 12, num_ranks, 1, 2), np.random.default_rng(0)
    old = draw.permutation(np.arange(12) % 6)
    tensors = rows_of(local(old, layout, rank))
    for _ in range(25):
        new = draw.permutation(np.concatenate([np.arange(6), draw.integers(0, 6, 6)]))
        move(tensors, old, new, layout, rank)
        found["moves"] += 1
        found["wrong"] += wrong(tensors, local(new, layout, rank))
        old = new
    if rank < 2:
        layout = ExpertLayout(4, 4, 2)
        for old, new in itertools.product(map(np.array, itertools.permutations(range(4))), repeat=2):
            tensors = rows_of(local(old, layout, rank))
            move(tensors, old, new, layout, rank, pair)
            found["pair_moves"] += 1
            found["wrong"] += wrong(tensors, local(new, layout, rank))
    return found


def balanced(rank, num_ranks):
    """A balancer under load, with a rank that is late each time."""
    layout, layers = ExpertLayout(8, 12, num_ranks), 3
    state = EplbState(layout, layers, "cpu", window_size=4, step_interval=4)
    weights = [rows_of(local(state.placement.physical_to_logical[0], layout, rank), layer) for layer in range(layers)]
    balancer = ExpertBalancer(state, weights)
    loads = np.random.default_rng(1).integers(1, 100, (num_ranks, layers, 12))
    expected_load = np.zeros((layers, 8), np.int64)
    for slot in range(12):
        expected_load[:, slot % 8] += loads.sum(0)[:, slot]
    state.expert_load_view += torch.from_numpy(loads[rank]).int()
    first, bad = state.placement.physical_to_logical.copy(), 0
    begin = time.monotonic()
    for step in range(4):
        if rank == num_ranks - 1:
            time.sleep(0.3)
        balancer.end_step()
        if step == 0:
            load = state.logical_load().tolist()
        held = state.placement.physical_to_logical
        bad += sum(wrong(weights[layer], local(held[layer], layout, rank), layer) for layer in range(layers))
    received = 0
    for layer in range(layers):
        old, new = first[layer], held[layer]
        arrive = set(local(new, layout, rank).tolist()) - set(local(old, layout, rank).tolist())
        received += len(arrive) * bytes_of_expert(weights[layer])
    return {
        "slow_seconds": time.monotonic() - begin,
        "slow_wrong": bad,
        "load": load,
        "expected_load": expected_load.tolist(),
        "report": asdict(balancer.last),
        "expected_bytes": received,
        "maps": state.logical_to_physical_map.tolist(),
    }


def failure(scenario, rank, num_ranks):
    """Rank 2 is lost: before a rebalance, within the move of a layer, or it sleeps longer than the timeout."""
    layout = ExpertLayout(6, 6, num_ranks)
    old, new = np.arange(6), np.array([2, 4, 0, 5, 1, 3])
    tensors = rows_of(local(old, layout, rank))
    state = EplbState(layout, 1, "cpu", step_interval=1, timeout=timedelta(seconds=3))
    balancer = ExpertBalancer(state, [tensors])
    state.expert_load_view += torch.arange(6).int()
    dist.barrier()
    begin, error = time.monotonic(), ""
    if rank == 2 and scenario == "never_comes":
        time.sleep(5)
        return {"error": ""}
    if rank == 2:
        os._exit(7)
    try:
        if scenario == "dies_within":
            move(tensors, old, new, layout, rank)
        else:
            balancer.end_step()
    except DistributedError as caught:
        error = str(caught)
    return {
        "error": error,
        "seconds": time.monotonic() - begin,
        "unchanged": wrong(tensors, local(old, layout, rank)) == 0,
    }


def main():
    scenario, num_ranks, store, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    if scenario == "move":
        pair = dist.new_group([0, 1])
        print(json.dumps(moves(rank, num_ranks, pair) | balanced(rank, num_ranks)), flush=True)
        dist.barrier()
    else:
        print(json.dumps(failure(scenario, rank, num_ranks)), flush=True)
        os._exit(0)  # a group with a dead member cannot be closed in order
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
