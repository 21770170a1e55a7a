"""GGUF checkpoints: a llama model has the config, names and row order it had before llama.cpp's converter."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGUFWriter
from torchplug.errors import CheckpointError
from torchplug.host.checkpoint import open_checkpoint
from torchplug.host.demo import find_demo_model
from transformers import AutoModelForCausalLM, GgufConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Write = Callable[..., dict[str, torch.Tensor]]

SHAPES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "one kv head": {"num_key_value_heads": 1},
    "odd heads": {"hidden_size": 120, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 24},
    "wide heads": {"head_dim": 40},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_weights_and_config_come_back(
    tmp_path: Path, write_gguf: Write, llama_config: dict[str, Any], changes: dict[str, Any]
) -> None:
    original = write_gguf(tmp_path / "x.gguf", **changes)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    read = dict(checkpoint.weights())
    assert read.keys() == original.keys() == checkpoint.tensors().keys()
    for name, tensor in original.items():
        assert torch.equal(read[name], tensor), name
        assert checkpoint.tensors()[name].shape == tuple(tensor.shape)
        assert checkpoint.tensors()[name].dtype_name == "float32"
    ids = {key: checkpoint.config.pop(key) for key in ("bos_token_id", "eos_token_id")}
    assert checkpoint.config == llama_config | changes
    assert checkpoint.generation_config == ids
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert checkpoint.dtype is None
    assert checkpoint.total_bytes == sum(tensor.nbytes for tensor in original.values())


@pytest.mark.parametrize("kind, dtype", [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", None)])
def test_weights_are_float32_unless_another_dtype_is_asked_for(
    tmp_path: Path, write_gguf: Write, kind: str, dtype: torch.dtype | None
) -> None:
    original = write_gguf(tmp_path / "x.gguf", kind=kind)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    half = dict(checkpoint.weights(torch.bfloat16))
    for name, values in checkpoint.weights():
        assert values.dtype == torch.float32
        assert torch.equal(half[name], values.bfloat16())
        if dtype is not None and values.dim() > 1:
            assert torch.equal(values, original[name].to(dtype).float())


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert all(problem.fix for problem in caught.value.problems)
    return str(caught.value)


def test_the_ends_of_a_turn_are_ends_of_generation(tmp_path: Path, write_gguf: Write) -> None:
    def edit(writer: GGUFWriter) -> None:
        writer.add_eot_token_id(3)
        writer.add_eom_token_id(270)

    write_gguf(tmp_path / "x.gguf", edit=edit)
    assert open_checkpoint(tmp_path / "x.gguf").generation_config["eos_token_id"] == [270, 3]


def test_an_unknown_architecture_lists_what_is_supported(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "x.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = refusal(tmp_path / "x.gguf")
    assert "'mamba'" in message and "supported from GGUF: llama" in message


REFUSED: dict[str, tuple[Callable[[GGUFWriter], Any], str]] = {
    "experts": (lambda writer: writer.add_expert_count(8), "mixture of experts"),
    "embedding model": (lambda writer: writer.add_causal_attention(False), "attention looks ahead"),
    "split": (lambda writer: writer.add_uint16("split.count", 3), "one of 3 parts"),
    "unknown tensor": (lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", numpy.ones(4, "f4")), "attn_sinks"),
    "unknown scaling": (lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"), "longrope"),
    "value heads": (lambda writer: writer.add_value_length(8), "is 8 where attention heads have 16"),
    "partial rotary": (lambda writer: writer.add_rope_dimension_count(8), "is 8 where attention heads have 16"),
    "odd heads": (lambda writer: writer.add_key_length(15), "need an even size of heads"),
    "no heads": (lambda writer: writer.add_head_count(0), "head_count: is 0"),
    "heads per layer": (lambda writer: writer.add_head_count([4, 2]), "head_count: the metadata under"),
    "rows and heads": (lambda writer: writer.add_head_count_kv(4), "expected 4 heads x 16 rows"),
    "eps": (lambda writer: writer.add_layer_norm_rms_eps(float("nan")), "rms_epsilon: is nan"),
    "odd factors": (
        lambda writer: writer.add_tensor("rope_freqs.weight", numpy.linspace(1, 9, 8, dtype="f4")),
        "llama3",
    ),
    "wrong factors": (lambda writer: writer.add_tensor("rope_freqs.weight", numpy.ones(5, "f4")), "not F32 [8]"),
    "vocabulary": (lambda writer: writer.add_token_list(["x"] * 301), "301 tokens, but an embedding of 300"),
}


@pytest.mark.parametrize("edit, says", REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, write_gguf: Write, edit: Callable[[GGUFWriter], Any], says: str
) -> None:
    def replace(writer: GGUFWriter) -> None:
        # gguf's writer refuses to set a key twice; the later value is the one wanted here.
        before = {key: writer.kv_data[0].pop(key) for key in list(writer.kv_data[0])}
        edit(writer)
        for key, value in before.items():
            writer.kv_data[0].setdefault(key, value)

    write_gguf(tmp_path / "x.gguf", edit=replace)
    assert says in refusal(tmp_path / "x.gguf")


def test_a_tensor_without_columns_is_read_as_such(tmp_path: Path, write_gguf: Write) -> None:
    """It is the loader's business to find its shape wrong; restoring the order of its rows once failed."""
    write_gguf(tmp_path / "x.gguf", num_hidden_layers=1, tie_word_embeddings=True)
    raw = (tmp_path / "x.gguf").read_bytes()
    shape = struct.pack("<QQ", 64, 64)
    at = raw.index(shape, raw.index(b"blk.0.attn_q.weight"))
    (tmp_path / "x.gguf").write_bytes(raw[:at] + struct.pack("<QQ", 0, 64) + raw[at + len(shape) :])
    read = dict(open_checkpoint(tmp_path / "x.gguf").weights())
    assert read["model.layers.0.self_attn.q_proj.weight"].shape == (64, 0)


def test_everything_that_is_missing_is_one_error(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    message = refusal(tmp_path / "x.gguf")
    for key in ("embedding_length", "block_count", "context_length", "feed_forward_length", "token_embd.weight"):
        assert key in message


def llama3_divisors(config: dict[str, Any]) -> numpy.ndarray:
    """What llama.cpp's converter stores, from transformers' own formula: plain frequencies over scaled ones."""
    plain = {key: value for key, value in config.items() if key != "rope_scaling"}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
    exponents = torch.arange(0, plain["head_dim"], 2) / plain["head_dim"]
    return (1.0 / plain["rope_theta"] ** exponents / scaled).numpy()


LLAMA3 = {
    "3.1": (128, 500000.0, 8.0, 4.0, 8192),
    "3.2": (64, 500000.0, 32.0, 4.0, 8192),
    "another": (128, 100000.0, 4.0, 8.0, 4096),
}


@pytest.mark.parametrize("head, theta, factor, high, original", LLAMA3.values(), ids=LLAMA3)
def test_llama3_rope_factors_become_the_scaling_they_came_from(
    tmp_path: Path, write_gguf: Write, head: int, theta: float, factor: float, high: float, original: int
) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    shape = {
        "head_dim": head,
        "rope_theta": theta,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    divisors = llama3_divisors(shape | {"max_position_embeddings": 131072, "rope_scaling": dict(scaling)})
    assert 1 < numpy.unique(divisors.round(6)).size < head // 2

    def edit(writer: GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", divisors.astype("f4"))

    write_gguf(tmp_path / "x.gguf", edit=edit, **shape)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    assert checkpoint.config["rope_scaling"] == scaling
    assert "rope_freqs.weight" not in checkpoint.tensors()


def test_linear_and_yarn_scaling_come_from_the_metadata(tmp_path: Path, write_gguf: Write) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 2.5)

    def yarn(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 32)

    def factor_only(writer: GGUFWriter) -> None:
        writer.add_float32("llama.rope.scaling.factor", 8.0)

    def old_key(writer: GGUFWriter) -> None:
        writer.add_float32("llama.rope.scale_linear", 2.0)

    def none(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "none")

    found = []
    for number, edit in enumerate((linear, yarn, factor_only, old_key, none)):
        write_gguf(tmp_path / f"{number}.gguf", edit=edit)
        found.append(open_checkpoint(tmp_path / f"{number}.gguf").config.get("rope_scaling"))
    assert found == [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "linear", "factor": 2.0},
        None,
    ]


@pytest.mark.oracle
def test_the_demo_models_weights_equal_transformers(one_thread: None) -> None:
    path = find_demo_model()
    oracle = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    expected = oracle.state_dict()
    checkpoint = open_checkpoint("demo")
    names = set()
    for name, tensor in checkpoint.weights():
        assert torch.equal(tensor, expected[name]), name
        names.add(name)
    assert expected.keys() - names == {"lm_head.weight"}
    assert checkpoint.config["tie_word_embeddings"] is True
    for key in (
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    ):
        assert checkpoint.config[key] == getattr(oracle.config, key)
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(oracle.config.rms_norm_eps, rel=1e-6)
    assert checkpoint.config["rope_theta"] == oracle.config.rope_parameters["rope_theta"]
