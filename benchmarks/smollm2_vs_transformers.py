"""SmolLM2-135M at batch 1: decode speed and time from process start to first token, beside transformers' `generate` in
the same run.

    python benchmarks/smollm2_vs_transformers.py [--dtype bfloat16] [--rounds 9] [--json]

Both read the same checkpoint directory, which `torchplug convert` makes from the demo model, with the same prompt of 32
tokens, greedy, end of sequence ignored. Decode: one process each, asked in turn, order reversed every other round;
tokens/s are (65 - 1) / (time for 65 tokens - time for 1). Start: a fresh process each time, from its creation until it
reports its first token, prompt of 16 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TORCHPLUG = """
import sys
from torchplug import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype=sys.argv[2], skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=1,
          enable_prefix_caching=False)
def generate(ids, n):
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
    return llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids
"""
TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=getattr(torch, sys.argv[2]))
def generate(ids, n):
    ids = torch.tensor([ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                         max_new_tokens=n, min_new_tokens=n)
    return out[0, ids.shape[1]:].tolist()
"""
SERVE = """
import json, time
print("ready", flush=True)
for line in sys.stdin:
    ids, n = json.loads(line)
    start = time.perf_counter()
    tokens = generate(ids, n)
    print(json.dumps([time.perf_counter() - start, list(tokens)]), flush=True)
"""
FIRST = "\nprint(generate(list(range(100, 116)), 1)[0], flush=True)\n"
ENGINES = {"torchplug": TORCHPLUG, "transformers": TRANSFORMERS}
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def start(name: str, body: str, model: Path, dtype: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ENGINES[name] + body, str(model), dtype]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )


def ask(process: subprocess.Popen[str], count: int) -> tuple[float, list[int]]:
    process.stdin.write(json.dumps([list(range(100, 132)), count]) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def decode_speed(model: Path, dtype: str, rounds: int) -> dict[str, list[float]]:
    engines = {name: start(name, SERVE, model, dtype) for name in ENGINES}
    speeds: dict[str, list[float]] = {name: [] for name in ENGINES}
    for process in engines.values():
        assert process.stdout.readline() == "ready\n", "an engine did not start"
        ask(process, 8)
    for index in range(rounds):
        tokens = {}
        for name in list(ENGINES) if index % 2 else list(ENGINES)[::-1]:
            first, _ = ask(engines[name], 1)
            whole, tokens[name] = ask(engines[name], 65)
            speeds[name].append(64 / (whole - first))
        if dtype == "float32" and len(set(map(tuple, tokens.values()))) > 1:
            sys.exit("the engines do not agree on the tokens")
    for process in engines.values():
        process.stdin.close()
        process.wait()
    return speeds


def start_times(model: Path, dtype: str, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ENGINES}
    for index in range(rounds + 1):  # the first round warms the page cache and is not counted
        for name in list(ENGINES) if index % 2 else list(ENGINES)[::-1]:
            began = time.perf_counter()
            process = start(name, FIRST, model, dtype)
            if not process.stdout.readline().strip().isdigit():
                sys.exit(f"{name} gave no token")
            if index:
                times[name].append(time.perf_counter() - began)
            process.communicate()
    return times


def summary(figures: dict[str, list[float]], *, more_is_better: bool) -> dict[str, object]:
    ours, theirs = figures["torchplug"], figures["transformers"]
    ratios = [a / b if more_is_better else b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "torchplug": round(statistics.median(ours), 2),
        "transformers": round(statistics.median(theirs), 2),
        "times as fast": round(statistics.median(ratios), 2),
        "range": [round(min(ratios), 2), round(max(ratios), 2)],
        "ahead": f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "smollm2")
        convert = [sys.executable, "-m", "torchplug", "convert", "demo", str(directory), "--dtype", arguments.dtype]
        subprocess.run(convert, check=True, stdout=subprocess.DEVNULL)
        result = {
            "decode tokens/s": summary(decode_speed(directory, arguments.dtype, arguments.rounds), more_is_better=True),
            "start to first token, s": summary(
                start_times(directory, arguments.dtype, arguments.rounds), more_is_better=False
            ),
        }
    print(json.dumps(result) if arguments.json else "\n".join(f"{name}: {row}" for name, row in result.items()))
