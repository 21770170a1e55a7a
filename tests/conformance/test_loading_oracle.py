"""Loading keeps its promises: the same numbers from any layout, all faults in one error, peak memory the model once."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torchplug
from checkpoints import assert_same_logits, edit_weights, module_logits
from llama_cases import ODD
from torch import Tensor

pytestmark = pytest.mark.oracle

CONFIG = ODD | {
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
    "mlp_bias": True,
}
(PROMPT,) = checkpoints.random_prompts(CONFIG["vocab_size"], (40,))


def our_logits(host: Any, directory: Path, dtype: str = "float32") -> Tensor:
    return module_logits(host.load(str(directory), device="cpu", dtype=dtype).module, PROMPT)


def oracle_logits(directory: Path) -> Tensor:
    return checkpoints.oracle_logits(checkpoints.oracle_model(directory), PROMPT)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_checkpoint_equals_transformers(host: Any, tmp_path: Path, tied: bool) -> None:
    config = CONFIG | {"tie_word_embeddings": tied}
    checkpoints.write_checkpoint(tmp_path, config, seed=0, max_shard_size="60KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    assert_same_logits(our_logits(host, tmp_path), oracle_logits(tmp_path))


def test_a_checkpoint_that_holds_fused_tensors_equals_its_separate_form(host: Any, tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, CONFIG, seed=0)
    expected = oracle_logits(tmp_path)
    packed: dict[str, list[str]] = host.model_class("LlamaForCausalLM").cls.packed_modules_mapping
    assert packed == {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}

    def fuse(weights: dict[str, Tensor]) -> None:
        for fused, parts in packed.items():
            for first in [name for name in weights if parts[0] in name]:
                tensors = [weights.pop(first.replace(parts[0], part)) for part in parts]
                weights[first.replace(parts[0], fused)] = torch.cat(tensors)

    edit_weights(tmp_path, fuse)
    assert_same_logits(our_logits(host, tmp_path), expected)


def test_tensors_that_old_checkpoints_carry_are_skipped(host: Any, tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, CONFIG | {"tie_word_embeddings": True}, seed=0)
    expected = oracle_logits(tmp_path)

    def add(weights: dict[str, Tensor]) -> None:
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # the model is tied

    edit_weights(tmp_path, add)
    assert_same_logits(our_logits(host, tmp_path), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_file_in_half_precision_loaded_in_float32_equals_transformers(
    host: Any, tmp_path: Path, dtype: torch.dtype
) -> None:
    checkpoints.write_checkpoint(tmp_path, CONFIG, seed=0, dtype=dtype)
    assert_same_logits(our_logits(host, tmp_path), oracle_logits(tmp_path))


def damage(weights: dict[str, Tensor]) -> None:
    weights["model.layers.1.self_attn.surprise.weight"] = torch.ones(3, 5)
    del weights["model.layers.0.post_attention_layernorm.weight"]
    del weights["model.layers.2.self_attn.k_proj.weight"]
    down = "model.layers.1.mlp.down_proj.weight"
    weights[down] = weights[down].T.contiguous()
    weights["model.layers.2.mlp.up_proj.bias"] = torch.ones(100)


def test_every_missing_unexpected_and_misshapen_tensor_is_in_one_error(host: Any, tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, CONFIG, seed=0)
    edit_weights(tmp_path, damage)
    with pytest.raises(torchplug.CheckpointError) as caught:
        host.load(str(tmp_path), device="cpu", dtype="float32")
    text = str(caught.value)
    for name in (
        "model.layers.1.self_attn.surprise.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.2.mlp.up_proj.bias",
    ):
        assert name in text
    # A part of a fused parameter: by its own name, or as a part of the parameter that it fills.
    assert any("model.layers.2.self_attn" in p.where and "k_proj" in p.where + p.says for p in caught.value.problems)
    for number in ("60", "101", "100"):  # both shapes of the transposed matrix, and the short bias
        assert number in text
    assert len(caught.value.problems) == 5
    assert str(tmp_path) in text or tmp_path.name in text


def test_an_untied_model_whose_head_is_missing_is_refused(host: Any, tmp_path: Path) -> None:
    checkpoints.write_checkpoint(tmp_path, CONFIG, seed=0)
    edit_weights(tmp_path, lambda weights: weights.__delitem__("lm_head.weight"))
    with pytest.raises(torchplug.CheckpointError, match=r"lm_head\.weight"):
        host.load(str(tmp_path), device="cpu", dtype="float32")


# Memory. What is measured: in a process of its own, RssAnon + RssShmem of /proc/<pid>/status, that is the memory that
# only this process holds, without the pages of mapped files, which the system may drop at will. The base is the level
# after torch, torchplug's loading and the model class are imported and the host has resolved the architecture; the
# parent then samples until loading is done.

CHILD = """
import sys
import torch, torchplug, torchplug.host.loading, safetensors
torch.set_num_threads(1)
torch.ones(1024) @ torch.ones(1024)
host = torchplug.Host()
host.model_class("LlamaForCausalLM")
print("ready", flush=True)
sys.stdin.readline()
{before}
loaded = host.load(sys.argv[1], device="cpu", dtype=sys.argv[2])
print(sum(p.numel() * p.element_size() for p in loaded.module.parameters()), flush=True)
sys.stdin.readline()
"""
HOLD_A_COPY = """
from safetensors.torch import load_file
copy = {name: tensor.clone() for name, tensor in load_file(sys.argv[1] + "/model.safetensors").items()}
"""
LARGE = ODD | {
    "vocab_size": 8000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
ALLOWED = 1.25


@dataclass(frozen=True)
class Peak:
    """Bytes: `peak` above the base while loading, and `weights` of the loaded module."""

    peak: int
    weights: int


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    return checkpoints.write_checkpoint(directory, LARGE, seed=0, dtype=torch.bfloat16)


def peak_while_loading(directory: Path, dtype: str, before: str = "") -> Peak:
    command = [sys.executable, "-c", CHILD.format(before=before), str(directory), dtype]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        base = own_memory(child.pid)
        peak, done = base, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(0.001):
                peak = max(peak, own_memory(child.pid))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            print(file=child.stdin, flush=True)
            weights = int(child.stdout.readline())
            peak = max(peak, own_memory(child.pid))
        finally:
            done.set()
            sampler.join()
        print(file=child.stdin, flush=True)
    return Peak(peak - base, weights)


def own_memory(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")


@needs_proc
@pytest.mark.parametrize(("dtype", "element_size"), [("auto", 2), ("float32", 4)])
def test_peak_memory_of_loading_is_the_model_once(large: Path, dtype: str, element_size: int) -> None:
    measured = peak_while_loading(large, dtype)
    numbers = (large / "model.safetensors").stat().st_size // 2
    assert measured.weights == pytest.approx(numbers * element_size, rel=0.001)
    assert measured.weights > 190e6
    assert measured.peak <= ALLOWED * measured.weights, (
        f"peak {measured.peak / 1e6:.0f} MB for {measured.weights / 1e6:.0f} MB of weights"
    )


@needs_proc
def test_a_second_copy_in_memory_would_be_seen(large: Path) -> None:
    measured = peak_while_loading(large, "auto", HOLD_A_COPY)
    assert measured.peak > ALLOWED * measured.weights
