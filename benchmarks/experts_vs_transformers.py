"""Mixtures of experts beside transformers' `generate` in the same process: prompt and decode speed at batch 1 and 8.

    python benchmarks/experts_vs_transformers.py [--rounds 5] [--json]

Small Mixtral and Qwen2-MoE shapes with random weights in bfloat16, the same checkpoint for both; prompts of 128 random
tokens, greedy, end of sequence ignored. The engines take turns, in another order every other round. Prompt: time to
the first token of the whole batch. Decode: batch * 31 / (time for 32 tokens - time for 1).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
import transformers

PROMPT, TOKENS = 128, 32
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[type, dict[str, int]]] = {
    "mixtral": (transformers.MixtralForCausalLM, SHAPE | {"num_local_experts": 8}),
    "qwen2_moe": (
        transformers.Qwen2MoeForCausalLM,
        SHAPE | {"num_experts": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024},
    ),
}
Generate = Callable[[list[list[int]], int], object]


def ours(directory: Path) -> Generate:
    from torchplug import LLM, SamplingParams

    llm = LLM(str(directory), skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=8, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], count: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    return generate


def theirs(directory: Path) -> Generate:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    def generate(prompts: list[list[int]], count: int) -> object:
        ids = torch.tensor(prompts)
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            pad_token_id=0,
            min_new_tokens=count,
            max_new_tokens=count,
        )

    return generate


def seconds(generate: Generate, prompts: list[list[int]], count: int) -> float:
    start = time.perf_counter()
    generate(prompts, count)
    return time.perf_counter() - start


def measure(batch: int, engines: dict[str, Generate], rounds: int) -> dict[str, dict[str, object]]:
    prompt: dict[str, list[float]] = {name: [] for name in engines}
    decode: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(rounds + 1):  # the first round warms up and is not counted
        generator = torch.Generator().manual_seed(index)
        prompts = torch.randint(3, SHAPE["vocab_size"], (batch, PROMPT), generator=generator).tolist()
        for name in list(engines) if index % 2 else list(engines)[::-1]:
            first, whole = (seconds(engines[name], prompts, count) for count in (1, TOKENS))
            if index:
                prompt[name].append(batch * PROMPT / first)
                decode[name].append(batch * (TOKENS - 1) / (whole - first))
    return {f"prompt tokens/s, batch {batch}": summary(prompt), f"decode tokens/s, batch {batch}": summary(decode)}


def summary(figures: dict[str, list[float]]) -> dict[str, object]:
    ratios = [a / b for a, b in zip(figures["torchplug"], figures["transformers"], strict=True)]
    medians = {name: round(statistics.median(speeds), 1) for name, speeds in figures.items()}
    return medians | {
        "times as fast": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = {}
    for name, (cls, shape) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config: Any = cls.config_class(**shape)  # type: ignore[attr-defined]
            cls(config).to(torch.bfloat16).save_pretrained(folder)
            engines = {"torchplug": ours(Path(folder)), "transformers": theirs(Path(folder))}
            for batch in (1, 8):
                for figure, row in measure(batch, engines, arguments.rounds).items():
                    result[f"{name}: {figure}"] = row
    print(json.dumps(result) if arguments.json else "\n".join(f"{figure}: {row}" for figure, row in result.items()))
