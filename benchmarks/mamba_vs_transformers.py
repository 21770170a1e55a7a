"""Mamba, Mamba-2, Bamba and Jamba against transformers in the same run: prompts of 128 and 512 tokens, eight of 128,
decoding at batch 1 and 8.

    python benchmarks/mamba_vs_transformers.py [--models bamba jamba ...] [--dtype bfloat16] [--rounds 5] [--json]

The shapes are those of Mamba-130m (24 layers, hidden size 768) and of small models of the others (8 layers, hidden size
512, Mamba-2 with 16 heads of 64; every fourth layer of the hybrids has attention, every second one of Jamba 4 experts),
with random weights. Both engines read the same directory in one process and are asked in turn, the order
reversed every other round. Prefill: the prompt's tokens / the time for one token. Decode: the batch times 32 tokens /
(the time for 33 tokens - the time for 1), prompts of 16 tokens, greedy, end of sequence ignored.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torchplug import LLM, SamplingParams

_IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_HYBRID = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
} | _IDS
MODELS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16, **_IDS)
    ),
    "mamba2": lambda: transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            vocab_size=32000,
            hidden_size=512,
            num_hidden_layers=8,
            num_heads=16,
            head_dim=64,
            state_size=64,
            n_groups=1,
            chunk_size=64,
            **_IDS,
        )
    ),
    "bamba": lambda: transformers.BambaForCausalLM(
        transformers.BambaConfig(
            **_HYBRID,
            intermediate_size=1408,
            attn_layer_indices=[2, 5],
            mamba_n_heads=16,
            mamba_d_state=64,
            mamba_chunk_size=64,
        )
    ),
    "jamba": lambda: transformers.JambaForCausalLM(
        transformers.JambaConfig(
            **_HYBRID,
            intermediate_size=1024,
            attn_layer_period=4,
            attn_layer_offset=2,
            num_experts=4,
            mamba_dt_rank=32,
        )
    ),
}
MOST_SEQS = 8
Generate = Callable[[list[list[int]], int], None]


def of_torchplug(directory: Path, dtype: str) -> Generate:
    llm = LLM(
        str(directory),
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=MOST_SEQS,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], count: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    return generate


def of_transformers(directory: Path, dtype: str) -> Generate:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], count: int) -> None:
        ids = torch.tensor(prompts)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, **options
            )

    return generate


def timed(generate: Generate, prompts: list[list[int]], count: int) -> float:
    start = time.perf_counter()
    generate(prompts, count)
    return time.perf_counter() - start


def prefill_speed(length: int, batch: int = 1) -> Callable[[Generate], float]:
    prompts = [list(range(100 + seq, 100 + seq + length)) for seq in range(batch)]
    return lambda generate: batch * length / timed(generate, prompts, 1)


def decode_speed(batch: int) -> Callable[[Generate], float]:
    prompts = [list(range(100 + seq, 116 + seq)) for seq in range(batch)]
    return lambda generate: batch * 32 / (timed(generate, prompts, 33) - timed(generate, prompts, 1))


MEASURES = {
    "prefill of 128": prefill_speed(128),
    "prefill of 512": prefill_speed(512),
    "prefill of 8 times 128": prefill_speed(128, MOST_SEQS),
    "decode at batch 1": decode_speed(1),
    "decode at batch 8": decode_speed(MOST_SEQS),
}


def measure(directory: Path, dtype: str, rounds: int) -> dict[str, dict[str, Any]]:
    engines = {"torchplug": of_torchplug(directory, dtype), "transformers": of_transformers(directory, dtype)}
    for generate in engines.values():
        generate([[1, 2, 3]], 4)
    result = {}
    for name, speed in MEASURES.items():
        found: dict[str, list[float]] = {engine: [] for engine in engines}
        for index in range(rounds):
            for engine in list(engines) if index % 2 else list(engines)[::-1]:
                found[engine].append(speed(engines[engine]))
        ratios = [ours / theirs for ours, theirs in zip(found["torchplug"], found["transformers"], strict=True)]
        result[f"{name}, tokens/s"] = {engine: round(statistics.median(speeds)) for engine, speeds in found.items()} | {
            "times as fast": round(statistics.median(ratios), 2),
            "range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    figures = {}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            MODELS[name]().to(getattr(torch, arguments.dtype)).save_pretrained(folder)
            figures[name] = measure(Path(folder), arguments.dtype, arguments.rounds)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, rows in figures.items():
            print(name, *(f"  {row}: {values}" for row, values in rows.items()), sep="\n")
