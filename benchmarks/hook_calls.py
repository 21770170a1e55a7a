"""What a hook call costs beside calling the author's method: direct, placed, wrapped, and with many plugins installed.

    python benchmarks/hook_calls.py [--json]

Each figure is the median over interleaved rounds of the best of a few timed loops, in the same process as its baseline.
The 200 installed plugins are real distributions in a temporary directory, found by the same host.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path

ROUNDS, LOOPS = 15, 20_000
TENSOR_CHECKS = 4
"""Of a wrapped call with tensors: two arguments, the author's result, and the wrapper's."""


def subject_model():
    """A small multimodal class, bound as `Host.load` binds it."""
    import torch
    from torch import nn
    from torchplug.config import DeviceConfig, HfConfig, ModelConfig, VllmConfig
    from torchplug.host.contracts import inspect_class
    from torchplug.host.model import LoadedModel
    from torchplug.interfaces import SupportsMultiModal

    class Subject(nn.Module, SupportsMultiModal):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__()
            self.result = torch.zeros(1, 8)

        @classmethod
        def get_placeholder_str(cls, modality, i):
            return modality

        def get_num_mm_encoder_tokens(self, num_image_tokens):
            return num_image_tokens

        def get_language_model(self):
            return self

        def embed_multimodal(self, **kwargs):
            return [self.result]

        def embed_input_ids(
            self, input_ids, multimodal_embeddings=None, *, is_multimodal=None, handle_oov_mm_token=False
        ):
            return self.result

        def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
            return self.result

        def compute_logits(self, hidden_states):
            return hidden_states

        def load_weights(self, weights):
            return set()

    hf_config = HfConfig({}, source="benchmark")
    vllm_config = VllmConfig(ModelConfig("benchmark", hf_config, torch.float32, 8), DeviceConfig(torch.device("cpu")))
    return LoadedModel(Subject(vllm_config=vllm_config), inspect_class(Subject, subject="benchmark"), vllm_config)


def measure() -> dict[str, float]:
    """Nanoseconds per call and ratios to the bare method."""
    import pluggy
    import torch
    import torchplug

    model = subject_model()
    module, hooks, ids = model.module, model.hooks, torch.tensor([1])
    mask = torch.tensor([True])
    bare_marker, spec_marker = pluggy.HookimplMarker("bare"), pluggy.HookspecMarker("bare")

    class Spec:
        @spec_marker(firstresult=True)
        def get_num_mm_encoder_tokens(self, model, num_image_tokens): ...

        @spec_marker(firstresult=True)
        def embed_input_ids(self, model, input_ids, multimodal_embeddings, is_multimodal, handle_oov_mm_token): ...

    class Owner:
        @bare_marker
        def get_num_mm_encoder_tokens(self, model, num_image_tokens):
            return num_image_tokens

        @bare_marker
        def embed_input_ids(self, model, input_ids, multimodal_embeddings, is_multimodal, handle_oov_mm_token):
            return model.result

    class Around:
        @bare_marker(wrapper=True)
        def get_num_mm_encoder_tokens(self, model, num_image_tokens):
            return (yield)

        @bare_marker(wrapper=True)
        def embed_input_ids(self, model):
            return (yield)

    manager = pluggy.PluginManager("bare")
    manager.add_hookspecs(Spec)
    manager.register(Owner())
    manager.register(Around())

    class Wrapper:
        @torchplug.hookimpl(wrapper=True)
        def get_num_mm_encoder_tokens(self, model, num_image_tokens):
            return (yield)

        @torchplug.hookimpl(wrapper=True)
        def embed_input_ids(self, model):
            return (yield)

    wrapped = subject_model()
    wrapped.attach(Wrapper())
    calls = {
        "method": lambda: module.get_num_mm_encoder_tokens(3),
        "hook": lambda: hooks.get_num_mm_encoder_tokens(3),
        "method with tensors": lambda: module.embed_input_ids(ids, is_multimodal=mask),
        "hook with tensors": lambda: hooks.embed_input_ids(ids, is_multimodal=mask),
        "plain pluggy, one wrapper": lambda: manager.hook.get_num_mm_encoder_tokens(model=module, num_image_tokens=3),
        "wrapped hook": lambda: wrapped.hooks.get_num_mm_encoder_tokens(3),
        "plain pluggy with tensors": lambda: manager.hook.embed_input_ids(
            model=module, input_ids=ids, multimodal_embeddings=None, is_multimodal=mask, handle_oov_mm_token=False
        ),
        "wrapped hook with tensors": lambda: wrapped.hooks.embed_input_ids(ids, is_multimodal=mask),
        "empty": lambda: None,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(ROUNDS):
        for name in list(calls) if index % 2 else list(calls)[::-1]:
            best = min(timeit.repeat(calls[name], number=LOOPS, repeat=2))
            times[name].append(best / LOOPS * 1e9)
    empty = statistics.median(times.pop("empty"))
    cost = {name: statistics.median(values) - empty for name, values in times.items()}
    return {f"{name} (ns)": round(value, 1) for name, value in cost.items()} | {
        "hook / method": round(cost["hook"] / cost["method"], 2),
        "tensors add (ns)": round(cost["hook with tensors"] - cost["method with tensors"], 1),
        "wrapping adds to plain pluggy (ns)": round(cost["wrapped hook"] - cost["plain pluggy, one wrapper"], 1),
        "wrapping adds per tensor check (ns)": round(
            (cost["wrapped hook with tensors"] - cost["plain pluggy with tensors"]) / TENSOR_CHECKS, 1
        ),
    }


def with_installed(count: int) -> dict[str, float]:
    """`measure` in a fresh process beside `count` installed model plugins."""
    with tempfile.TemporaryDirectory() as folder:
        for index in range(count):
            info = Path(folder, f"fake_{index}-1.0.dist-info")
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{index}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[torchplug.models.v1]\nFake{index} = fake_{index}:Model\n")
        code = f"import sys; sys.path[:0] = [{folder!r}, {str(Path(__file__).parent)!r}]\n"
        code += "import json, torchplug, hook_calls\n"
        code += f"assert sum(a.startswith('Fake') for a in torchplug.Host().architectures) == {count}\n"
        code += "print(json.dumps(hook_calls.measure()))"
        return json.loads(
            subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = {count: with_installed(count) for count in (1, 200)}
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(f"{'':40}{'1 plugin':>12}{'200 plugins':>14}")
        for name in figures[1]:
            print(f"{name:40}{figures[1][name]:>12}{figures[200][name]:>14}")
