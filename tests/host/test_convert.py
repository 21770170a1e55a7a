"""Converting a GGUF file: a directory that torchplug and transformers load, there complete or not at all."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torchplug.errors import CheckpointError
from torchplug.host import convert as convert_module
from torchplug.host.checkpoint import open_checkpoint
from torchplug.host.convert import convert
from torchplug.host.demo import find_demo_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

Write = Callable[..., dict[str, torch.Tensor]]


def assert_nothing_but(directory: Path, *names: str) -> None:
    assert sorted(path.name for path in directory.iterdir()) == sorted(names)


def test_a_converted_directory_is_the_checkpoint_it_came_from(tmp_path: Path, write_gguf: Write) -> None:
    original = write_gguf(tmp_path / "x.gguf")
    source = open_checkpoint(tmp_path / "x.gguf")
    seen: list[tuple[int, int]] = []
    written = convert(source, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    result = open_checkpoint(tmp_path / "out")
    assert result.config == source.config | {"torch_dtype": "float32"}
    assert result.generation_config == source.generation_config
    assert result.special_tokens == source.special_tokens
    assert result.chat_template == source.chat_template
    read = dict(result.weights())
    assert read.keys() == original.keys()
    assert all(torch.equal(read[name], original[name]) for name in original)
    text = "hello  world 12<|a|>"
    assert result.tokenizer().encode(text).ids == source.tokenizer().encode(text).ids
    assert written.path == tmp_path / "out" and written.has_tokenizer
    assert (written.dtype, written.tensors) == ("float32", len(original))
    assert written.parameters == sum(tensor.numel() for tensor in original.values())
    assert dict(written.files) == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert dict(written.files).keys() == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    total = written.parameters * 4
    assert seen == sorted(seen) and len(seen) == len(original) and seen[-1] == (total, total)
    assert_nothing_but(tmp_path, "x.gguf", "out")


@pytest.mark.parametrize(
    "kind, asked, expected",
    [
        ("F16", "auto", "float16"),
        ("BF16", "auto", "bfloat16"),
        ("Q8_0", "auto", "bfloat16"),
        ("Q8_0", "float32", "float32"),
        ("F32", "bfloat16", "bfloat16"),
    ],
)
def test_the_dtype_is_the_files_or_the_one_asked_for(
    tmp_path: Path, write_gguf: Write, kind: str, asked: str, expected: str
) -> None:
    write_gguf(tmp_path / "x.gguf", kind=kind)
    source = open_checkpoint(tmp_path / "x.gguf")
    written = convert(source, tmp_path / "out", dtype=asked)
    assert written.dtype == expected
    assert open_checkpoint(tmp_path / "out").dtype == expected
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name, values in source.weights():
        assert torch.equal(saved[name], values.to(getattr(torch, expected)))


def test_large_weights_become_shards_with_an_index(tmp_path: Path, write_gguf: Write) -> None:
    original = write_gguf(tmp_path / "x.gguf")
    limit = 60_000  # smaller than the embedding, which then has a file of its own
    convert(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "out", shard_bytes=limit)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3
    assert [path.name for path in shards] == [
        f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))
    ]
    loaded = [load_file(path) for path in shards]
    assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= limit for part in loaded)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    read = dict(open_checkpoint(tmp_path / "out").weights())
    assert read.keys() == original.keys()
    assert all(torch.equal(read[name], original[name]) for name in original)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.state_dict()["lm_head.weight"], original["lm_head.weight"])


def test_transformers_computes_the_same_with_biases_and_scaled_rotary(tmp_path: Path, write_gguf: Write) -> None:
    """The GGUF file read by transformers itself is the oracle, for a model that is odd in every respect it can read."""

    def edit(writer: Any) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 2.0)

    write_gguf(tmp_path / "x.gguf", attention_bias=True, num_key_value_heads=1, edit=edit)
    convert(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.rope_parameters["rope_type"] == "linear" and model.config.rope_parameters["factor"] == 2.0
    assert model.config.attention_bias is True
    for name, values in open_checkpoint(tmp_path / "x.gguf").weights():
        assert torch.equal(model.state_dict()[name], values)


def test_a_file_without_a_tokenizer_becomes_a_directory_without_one(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "x.gguf", tokenizer=None)
    written = convert(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "out")
    assert not written.has_tokenizer
    assert_nothing_but(tmp_path / "out", "config.json", "model.safetensors")


def refusal(source: Any, destination: Path, **options: Any) -> str:
    before = sorted(destination.parent.iterdir()) if destination.parent.is_dir() else None
    with pytest.raises(CheckpointError) as caught:
        convert(source, destination, **options)
    assert all(problem.fix for problem in caught.value.problems)
    if before is not None:
        assert sorted(destination.parent.iterdir()) == before
    return str(caught.value)


def test_only_a_new_or_an_empty_directory_is_written(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "x.gguf")
    source = open_checkpoint(tmp_path / "x.gguf")
    empty, full, file, link = (tmp_path / name for name in ("empty", "full", "file", "link"))
    empty.mkdir()
    link.symlink_to(empty)
    full.mkdir()
    (full / "mine").write_text("keep")
    file.write_text("keep")
    assert "is a directory with files in it" in refusal(source, full)
    assert "is a file" in refusal(source, file)
    assert "there is no directory" in refusal(source, tmp_path / "no" / "where")
    assert (full / "mine").read_text() == file.read_text() == "keep"
    convert(source, link)
    assert open_checkpoint(empty).tensors() and link.is_symlink()
    assert_nothing_but(tmp_path, "x.gguf", "empty", "full", "file", "link")


def test_what_cannot_be_converted_is_refused(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "x.gguf")
    source = open_checkpoint(tmp_path / "x.gguf")
    assert "'int8' is not written" in refusal(source, tmp_path / "out", dtype="int8")
    convert(source, tmp_path / "done")
    assert "is a checkpoint directory already" in refusal(open_checkpoint(tmp_path / "done"), tmp_path / "out")


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop, RuntimeError])
@pytest.mark.parametrize("exists", [False, True])
def test_an_end_in_the_middle_leaves_nothing_behind(
    tmp_path: Path, write_gguf: Write, error: type[BaseException], exists: bool
) -> None:
    write_gguf(tmp_path / "x.gguf")
    if exists:
        (tmp_path / "out").mkdir()

    def fail(done: int, total: int) -> None:
        assert len(list(tmp_path.glob(".out.*.partial/model.safetensors"))) == 1
        if done > total // 2:
            raise error

    with pytest.raises(error):
        convert(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "out", progress=fail)
    assert_nothing_but(tmp_path, "x.gguf", *(["out"] if exists else []))
    assert not exists or not list((tmp_path / "out").iterdir())


def test_a_damaged_source_leaves_nothing_behind(tmp_path: Path, write_gguf: Write) -> None:
    write_gguf(tmp_path / "x.gguf", edit=lambda writer: writer.kv_data[0].pop("tokenizer.ggml.merges"))
    assert "has no merges" in refusal(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "out")


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, write_gguf: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "x.gguf")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    message = refusal(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "out")
    assert "the disk is full: about 0 MB are needed, 0 MB are free" in message and str(tmp_path) in message


@pytest.mark.parametrize("number, says", [(errno.ENOSPC, "the disk is full"), (errno.EIO, "Input/output error")])
def test_a_write_that_fails_is_an_error_with_a_fix(
    tmp_path: Path, write_gguf: Write, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    write_gguf(tmp_path / "x.gguf")
    written = []

    def failing(tensor: torch.Tensor) -> memoryview:
        written.append(tensor)
        if len(written) == 4:
            raise OSError(number, "Input/output error")
        return memoryview(b"")

    monkeypatch.setattr(convert_module, "_bytes", failing)
    assert says in refusal(open_checkpoint(tmp_path / "x.gguf"), tmp_path / "out")


@pytest.mark.oracle
def test_the_converted_demo_model_equals_transformers(tmp_path: Path, one_thread: None) -> None:
    path = find_demo_model()
    convert(open_checkpoint("demo"), tmp_path / "out", dtype="float32")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    assert ours.dtype == torch.float32
    our_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    their_tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("What is the capital of France?", "  x = [\n    1,\n    22]", "日本語 😀<|im_end|>", ""):
        assert our_tokenizer(text).input_ids == their_tokenizer(text).input_ids
    assert our_tokenizer.special_tokens_map == their_tokenizer.special_tokens_map
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = our_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    same = their_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert torch.equal(ids, same)
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert ours.generation_config.eos_token_id == 2


PEAK_OF_A_CONVERSION = """
import sys, threading, time
import torch
from torchplug.host.checkpoint import open_checkpoint
from torchplug.host.convert import convert
torch.set_num_threads(1)
def held():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) // 1024
peaks, done = [], threading.Event()
def watch():
    while not done.wait(0.002):
        peaks.append(held())
before = held()
thread = threading.Thread(target=watch)
thread.start()
convert(open_checkpoint("demo"), sys.argv[1], dtype="bfloat16")
done.set()
thread.join()
print(max(peaks) - before)
"""


@pytest.mark.oracle
def test_memory_is_the_largest_tensor_not_the_model(tmp_path: Path) -> None:
    """The demo model is 269 MB in bfloat16, its embedding 57 MB; the tokenizer takes some 20 MB."""
    result = subprocess.run(
        [sys.executable, "-c", PEAK_OF_A_CONVERSION, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert int(result.stdout) < 57 + 64, result.stderr
