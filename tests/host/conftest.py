"""Files to damage: a small safetensors checkpoint and a small llama GGUF with a byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from safetensors.torch import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def llama_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 weights of a llama model, in Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads * head, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * head, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * head, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * head),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
        if config["attention_bias"]:
            shapes |= {
                f"{prefix}.self_attn.q_proj.bias": (heads * head,),
                f"{prefix}.self_attn.k_proj.bias": (kv_heads * head,),
                f"{prefix}.self_attn.v_proj.bias": (kv_heads * head,),
                f"{prefix}.self_attn.o_proj.bias": (hidden,),
            }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def llama_cpp_rows(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rows in which llama.cpp's converter stores queries and keys."""
    return torch.cat([torch.stack(head.chunk(2), 1).flatten(0, 1) for head in tensor.chunk(heads)])


def byte_tokens() -> list[str]:
    """GPT-2's spelling of the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


MERGES = ["h e", "l l", "o w", "he ll", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld", "hell o", "1 2", "Ġ Ġ", "ĠĠ ĠĠ"]


def add_byte_level_tokenizer(writer: GGUFWriter, pre: str, size: int) -> None:
    """Bytes, merges, `<|a|>` (bos), `<|b|>` (eos), `<|c|>`, an added token `<think>`, padding up to `size` tokens."""
    tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in MERGES), "<|a|>", "<|b|>", "<|c|>", "<think>"]
    kinds = [TokenType.NORMAL] * (len(tokens) - 4) + [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED]
    for number in range(len(tokens), size):
        tokens.append(f"[PAD{number}]")
        kinds.append(TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(tokens.index("<|a|>"))
    writer.add_eos_token_id(tokens.index("<|b|>"))
    writer.add_chat_template("{% for message in messages %}<|a|>{{ message['content'] }}<|b|>{% endfor %}")


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., dict[str, torch.Tensor]]:
    """write_gguf(path, kind="F32", pre="gpt-2", edit=None, tokenizer=add_byte_level_tokenizer, **config).

    Writes a llama model and returns its weights in Hugging Face names. `kind` is the type of the matrices;
    `edit(writer)` adds what else the file shall hold.
    """

    def write(
        path: Path,
        *,
        kind: str = "F32",
        pre: str = "gpt-2",
        edit: Callable[[GGUFWriter], None] | None = None,
        tokenizer: Callable[[GGUFWriter, str, int], None] | None = add_byte_level_tokenizer,
        **changes: Any,
    ) -> dict[str, torch.Tensor]:
        config = CONFIG | changes
        weights = llama_weights(config)
        writer = GGUFWriter(str(path), "llama")
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_vocab_size(config["vocab_size"])
        if tokenizer is not None:
            tokenizer(writer, pre, config["vocab_size"])
        if edit is not None:
            edit(writer)
        for name, tensor in weights.items():
            for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
                if part in name:
                    tensor = llama_cpp_rows(tensor, config[heads])
            values = numpy.ascontiguousarray(tensor.numpy())
            stored = GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
            writer.add_tensor(gguf_name(name), quants.quantize(values, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return weights

    return write


@pytest.fixture(scope="session")
def llama_config() -> dict[str, Any]:
    """config.json of the model that `write_gguf` and `checkpoint_directory` write."""
    return dict(CONFIG)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests on many small tensors, which more threads make slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def checkpoint_directory(tmp_path: Path) -> Path:
    """A complete directory with one safetensors file."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "float32"}))
    save_file(llama_weights(CONFIG), directory / "model.safetensors", {"format": "pt"})
    return directory
