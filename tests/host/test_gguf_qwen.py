"""GGUF files of Qwen2 and Qwen3: what transformers' own models held before llama.cpp's converter comes back, and runs.

Tensor names come from gguf-py's own table. The converter leaves the rows of these families in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from torchplug import Host
from torchplug.errors import CheckpointError
from torchplug.host.checkpoint import open_checkpoint
from torchplug.host.convert import convert
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

BASE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 60,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
# transformers reads no head size from a GGUF file, so that where it is compared the size is its default.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": BASE | QWEN2 | {"head_dim": 10},
    "qwen2 tied": BASE | QWEN2 | {"head_dim": 10, "tie_word_embeddings": True},
    "qwen3": BASE | QWEN3 | {"head_dim": 128},
    "qwen3 tied, odd heads": BASE
    | QWEN3
    | {"head_dim": 24, "num_attention_heads": 5, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3 with biases": BASE | QWEN3 | {"head_dim": 24, "attention_bias": True},
}


def write(path: Path, config: dict[str, Any], edit: Callable[[gguf.GGUFWriter], Any] = lambda writer: None) -> Any:
    """Write a random transformers model as llama.cpp's converter does, and return it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 0.8, 0.2)
    kind = config["model_type"]
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_name(kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    edit(writer)
    architecture = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[kind]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in weights_of(model).items():
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")), numpy.ascontiguousarray(tensor.numpy())
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_weights_and_config_come_back(tmp_path: Path, config: dict[str, Any]) -> None:
    original = weights_of(write(tmp_path / "x.gguf", config))
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    read = dict(checkpoint.weights())
    assert read.keys() == original.keys() == checkpoint.tensors().keys()
    for name, tensor in original.items():
        assert torch.equal(read[name], tensor), name
    assert checkpoint.config.pop("rms_norm_eps") == pytest.approx(config["rms_norm_eps"], rel=1e-6)
    assert checkpoint.config == {key: value for key, value in config.items() if key != "rms_norm_eps"}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_logits_equal_the_model_that_was_written_and_its_conversion(tmp_path: Path, config: dict[str, Any]) -> None:
    ids = torch.arange(0, 300, 11)
    model = write(tmp_path / "x.gguf", config)
    loaded = Host().load(str(tmp_path / "x.gguf"), device="cpu", dtype="float32").module
    convert(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "directory", dtype="float32")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "directory", dtype=torch.float32)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
        ours = loaded.compute_logits(loaded(ids, torch.arange(len(ids))))
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
        torch.testing.assert_close(converted(ids[None]).logits[0], expected)


@pytest.mark.parametrize("name", ["qwen2", "qwen2 tied", "qwen3"])
def test_transformers_reads_the_same_weights_from_the_file(tmp_path: Path, name: str) -> None:
    write(tmp_path / "x.gguf", MODELS[name])
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="x.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected = weights_of(oracle)
    read = dict(open_checkpoint(tmp_path / "x.gguf").weights())
    assert read.keys() == expected.keys()
    for key, tensor in read.items():
        assert torch.equal(tensor, expected[key]), key


REFUSED: dict[str, tuple[str, Callable[[gguf.GGUFWriter], Any], str]] = {
    "window": ("qwen2", lambda writer: writer.add_sliding_window(9), "layers see only 9 of up to 128 tokens"),
    "experts": ("qwen3", lambda writer: writer.add_expert_count(8), "mixture of experts"),
    "embedding model": ("qwen2", lambda writer: writer.add_causal_attention(False), "attention looks ahead"),
    "a norm that Qwen2 has not": (
        "qwen2",
        lambda writer: writer.add_tensor("blk.0.attn_q_norm.weight", numpy.ones(10, "f4")),
        "is not a tensor of architecture qwen2",
    ),
}


@pytest.mark.parametrize("name, edit, says", REFUSED.values(), ids=REFUSED)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, name: str, edit: Callable[[gguf.GGUFWriter], Any], says: str
) -> None:
    write(tmp_path / "x.gguf", MODELS[name], edit)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "x.gguf")
    assert says in str(caught.value) and all(problem.fix for problem in caught.value.problems)


def test_a_window_as_long_as_the_context_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", MODELS["qwen2"], lambda writer: writer.add_sliding_window(128))
    assert open_checkpoint(tmp_path / "x.gguf").architecture == "Qwen2ForCausalLM"


def test_yarn_of_a_long_context_file_reaches_the_config(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    write(tmp_path / "x.gguf", MODELS["qwen2"], yarn)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert open_checkpoint(tmp_path / "x.gguf").config["rope_scaling"] == scaling
