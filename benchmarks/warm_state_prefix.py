"""Time to the first token of a prompt whose first 512 tokens were seen before, against a new prompt, in the same run.

    python benchmarks/warm_state_prefix.py [--models MambaForCausalLM ...] [--dtype bfloat16] [--rounds 5] [--json]

Shapes: Mamba-130m (24 layers, hidden size 768), and a small Mamba-2 (8 layers, hidden size 512, 16 heads of 64), with
random weights. A prompt is 512 tokens that others have had, or nobody, then 16 of its own. Cold and warm alternate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch
from torchplug import LLMEngine, SamplingParams
from torchplug.testing import Specimen

SHARED, OWN = 512, 16
SHAPES: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16}
    | {"intermediate_size": 1536, "time_step_rank": 48, "conv_kernel": 4},
    "Mamba2ForCausalLM": {"vocab_size": 32000, "hidden_size": 512, "num_hidden_layers": 8, "state_size": 64}
    | {"num_heads": 16, "head_dim": 64, "n_groups": 1, "conv_kernel": 4, "chunk_size": 64},
}


def first_token(engine: LLMEngine, prompt: list[int]) -> tuple[float, int]:
    """Seconds, and how many tokens of the prompt were cached."""
    begin = time.perf_counter()
    engine.add_request("x", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False))
    outputs = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
    return time.perf_counter() - begin, outputs[0].num_cached_tokens or 0


def measure(architecture: str, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    specimen = Specimen(architecture, config=SHAPES[architecture] | {"max_position_embeddings": 1024})
    model = specimen.load(torch.device("cpu"), dtype)
    engine = LLMEngine(model)
    choose = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [choose.randrange(SHAPES[architecture]["vocab_size"]) for _ in range(count)]

    shared = tokens(SHARED)
    first_token(engine, shared + tokens(OWN))
    cold, warm = [], []
    for _ in range(rounds):
        seconds, cached = first_token(engine, tokens(SHARED + OWN))
        assert not cached
        cold.append(seconds)
        seconds, cached = first_token(engine, shared + tokens(OWN))
        assert cached == SHARED
        warm.append(seconds)
    ratios = [one / other for one, other in zip(cold, warm, strict=True)]
    return {
        "cold, ms": round(1000 * statistics.median(cold), 1),
        "warm, ms": round(1000 * statistics.median(warm), 1),
        "times sooner": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {name: measure(name, getattr(torch, options.dtype), options.rounds) for name in options.models}
    if options.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(name, ", ".join(f"{what} {figure}" for what, figure in figures.items()))


if __name__ == "__main__":
    main()
