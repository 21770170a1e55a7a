"""The rebalance policy against vLLM's, which equals DeepSeek's published one: time, balance and slots that change.

Run: python benchmarks/eplb_policy.py --peer VENV [--rounds 5], where VENV is an environment that has vLLM. The peer
runs in its own process; rounds are interleaved, one thread each. The load follows a power law and drifts from round to
round; both start at the same placement and go on from their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from torchplug.engine.eplb_policy import rebalance
from torchplug.engine.expert_placement import ExpertLayout, Placement, balance, rank_loads

LAYERS = 58
CASES = (
    ("256 experts, 288 slots, 32 ranks on 4 nodes, 8 groups", ExpertLayout(256, 288, 32, 8, 4)),
    ("256 experts, 288 slots, 32 ranks", ExpertLayout(256, 288, 32)),
    ("1024 experts, 1088 slots, 64 ranks on 8 nodes, 8 groups", ExpertLayout(1024, 1088, 64, 8, 8)),
    ("1024 experts, 1088 slots, 64 ranks", ExpertLayout(1024, 1088, 64)),
)
SKEWS = (0.5, 1.0)

PEER = """
import json, sys, time, torch
torch.set_num_threads(1)
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
print("READY", flush=True)
for line in sys.stdin:
    load, physical, groups, nodes, ranks, current = json.loads(line)
    load, current = torch.tensor(load), None if current is None else torch.tensor(current)
    begin = time.perf_counter()
    slots = DefaultEplbPolicy.rebalance_experts(load, physical, groups, nodes, ranks, current)
    print("DONE", json.dumps([time.perf_counter() - begin, slots.tolist()]), flush=True)
"""


class Peer:
    def __init__(self, venv: Path) -> None:
        command = [str(venv / "bin" / "python"), "-c", PEER]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer("READY")

    def _answer(self, word: str) -> str:
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        sys.exit("the peer ended; does its environment have vLLM?")

    def rebalance(self, load, layout, current):
        now = None if current is None else current.tolist()
        task = [load.tolist(), layout.num_physical, layout.num_groups, layout.num_nodes, layout.num_ranks, now]
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        seconds, slots = json.loads(self._answer("DONE"))
        return seconds, np.array(slots)


def timed(load, layout, current):
    begin = time.perf_counter()
    placement = rebalance(load, layout, current)
    return time.perf_counter() - begin, placement.physical_to_logical


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    peer = Peer(options.peer)
    for name, layout in CASES:
        for skew in SKEWS:
            rng = np.random.default_rng(0)
            law = -skew * np.log(np.arange(1, layout.num_logical + 1))
            popularity = np.stack([rng.permutation(law) for _ in range(LAYERS)])
            ours = theirs = Placement.initial(LAYERS, layout).physical_to_logical
            figures: dict[str, list[float]] = {"scratch": [], "kept": [], "balance": [], "moved": [], "peer moved": []}
            worst = 1.0
            for _ in range(options.rounds + 1):
                popularity = popularity + 0.1 * rng.standard_normal(popularity.shape)
                chance = np.exp(popularity)
                load = rng.multinomial(10**6, chance / chance.sum(1, keepdims=True))
                scratch_seconds, _ = timed(load, layout, None)
                peer_scratch_seconds, _ = peer.rebalance(load, layout, None)
                seconds, new = timed(load, layout, ours)
                peer_seconds, peer_new = peer.rebalance(load, layout, theirs)
                even = [balance(rank_loads(load, Placement.of(each, layout), layout)) for each in (new, peer_new)]
                worst = min(worst, float((even[0] / even[1]).min()))
                for key, value in (
                    ("scratch", scratch_seconds / peer_scratch_seconds),
                    ("kept", seconds / peer_seconds),
                    ("balance", float(even[0].mean() / even[1].mean())),
                    ("moved", float((new != ours).mean())),
                    ("peer moved", float((peer_new != theirs).mean())),
                ):
                    figures[key].append(value)
                ours, theirs = new, peer_new
            found = {key: statistics.median(values[1:]) for key, values in figures.items()}
            print(
                f"{name}, skew {skew}: time {found['scratch']:.2f} of the peer's from scratch and"
                f" {found['kept']:.2f} with a placement in force (first one {figures['kept'][0]:.2f});"
                f" balance {found['balance']:.4f} of the peer's, worst layer {worst:.4f};"
                f" slots changed {found['moved']:.2f} against {found['peer moved']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
