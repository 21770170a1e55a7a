"""What a step costs without the model: scheduler and runner, with a module that computes nothing.

Run: python benchmarks/step_overhead.py [--steps 400]. Bars: 150 us at batch 1, 600 us at batch 32, flat in the number
of waiting requests up to 10,000. Medians; the machine's other work shows in the 95th percentile.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace

import torch
from torch import nn
from torchplug.config import DeviceConfig, HfConfig, ModelConfig, SchedulerConfig, VllmConfig
from torchplug.engine.llm_engine import LLMEngine
from torchplug.engine.sampling_params import SamplingParams
from torchplug.layers import Attention

BARS = {1: 150, 32: 600}
PROMPT = 1024


class Nothing(nn.Module):
    """Attention layers that are never called, so that there is a cache to manage."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        super().__init__()
        self.attn = nn.ModuleList([Attention(2, 4, 1.0, 2, sliding_window=window) for window in windows])
        self.hidden, self.logits = torch.zeros(8192, 4), torch.zeros(64, 8)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.hidden[: len(input_ids)]

    def compute_logits(self, hidden_states):
        return self.logits[: len(hidden_states)]


def engine_of(windows: tuple[int | None, ...], batch: int, waiting: int) -> LLMEngine:
    device = torch.device("cpu")
    config = VllmConfig(
        ModelConfig("nothing", HfConfig({"vocab_size": 1000}, source="none"), torch.float32, 4096),
        DeviceConfig(device),
        scheduler_config=SchedulerConfig(batch, 8192),
    )
    model = SimpleNamespace(
        module=Nothing(windows),
        vllm_config=config,
        device=device,
        dtype=torch.float32,
        checkpoint=None,
        close=lambda: None,
        wrappers_of=lambda hook: (),
        subject="plugin 'Test' (test==1.0, test:Model)",
    )
    engine = LLMEngine(model)
    params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True, detokenize=False)
    for index in range(batch + waiting):
        prompt = [(7 * index + place) % 1000 for place in range(PROMPT)] if index < batch else [1, 2, 3]
        engine.add_request(str(index), prompt, params)
    while engine.num_running < batch or any(not r.num_output_tokens for r in engine._scheduler._running):
        engine.step()
    return engine


def measure(engine: LLMEngine, steps: int) -> list[float]:
    """Microseconds of each step's scheduling and running, without sampling."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        batch = engine._scheduler.schedule()
        with torch.inference_mode():
            engine._runner.run(batch)
        times.append(1e6 * (time.perf_counter() - start))
        for item in batch:
            item.request.num_computed = item.stop
            item.request.token_ids.append(5)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print("windows        batch  waiting   median us  p95 us  bar us")
    for windows in ((None,), (None, 64)):
        for batch in (1, 32):
            for waiting in (0, 10_000):
                engine = engine_of(windows, batch, waiting)
                times = sorted(measure(engine, steps))
                engine.close()
                median, late = statistics.median(times), times[int(0.95 * len(times))]
                print(
                    f"{windows!s:13}  {batch:5}  {waiting:7}  {median:10.0f}  {late:6.0f}  {BARS[batch]:6}", flush=True
                )


if __name__ == "__main__":
    main()
