"""A GGUF file as a checkpoint directory that transformers, vLLM and torchplug load: dequantised, in Hugging Face names.

Weights are streamed: the header of every safetensors file follows from the GGUF header, so that one tensor at a time is
in memory. The directory is written beside its destination and renamed at the end, so it is complete or not there.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchplug.errors import CheckpointError, Problem
from torchplug.host.checkpoint import Checkpoint, TensorInfo
from torchplug.host.gguf_checkpoint import GgufCheckpoint
from torchplug.host.safetensors_file import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

FLOAT_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHARD_BYTES = 5 * 10**9
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written: `files` are (name, bytes); `dtype` is the name of the weights' torch dtype."""

    path: Path
    dtype: str
    tensors: int
    parameters: int
    files: tuple[tuple[str, int], ...]
    has_tokenizer: bool


def convert(
    source: Checkpoint,
    destination: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Converted:
    """Write `source` as a checkpoint directory.

    Args:
        source: An opened GGUF file.
        destination: A directory that does not exist yet, in one that does; or an empty directory.
        dtype: "float32", "bfloat16", "float16"; "auto" is the type of a file that is not quantised, else bfloat16,
            whose rounding is well below that of every quantisation.
        shard_bytes: Weights beyond this size are split into shards with an index.
        progress: Called with (bytes written, bytes in all) after each tensor.

    Raises:
        CheckpointError: `source` is no GGUF file or cannot be dequantised, `destination` cannot be written, disk full.
            Whatever ends the conversion early, nothing of it is left behind.
    """
    import torch

    if not isinstance(source, GgufCheckpoint):
        says = "is a checkpoint directory already"
        raise CheckpointError(f"convert {source.name!r}", Problem("", says, "name a .gguf file, or `demo`"))
    chosen = _auto_dtype(source) if dtype == "auto" else dtype
    if chosen not in FLOAT_DTYPES:
        fix = f"one of {', '.join(FLOAT_DTYPES)}, auto"
        raise CheckpointError(f"convert {source.name!r}", Problem("dtype", f"{dtype!r} is not written", fix))
    tensors = source.tensors()
    width = FLOAT_DTYPES[chosen]
    total = width * sum(prod(tensor.shape) for tensor in tensors.values())
    with _appearing(Path(destination), total, source.name) as directory:
        _write_json(directory / "config.json", source.config | {"torch_dtype": chosen})
        if source.generation_config:
            _write_json(directory / "generation_config.json", source.generation_config)
        if source.vocabulary is not None:
            _write_tokenizer(source, directory)
        shards = _shards(list(tensors.values()), width, shard_bytes)
        if len(shards) > 1:
            weight_map = {tensor.name: name for name, members in shards.items() for tensor in members}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            _write_json(directory / "model.safetensors.index.json", index)
        weights, done = source.weights(getattr(torch, chosen)), 0
        for name, members in shards.items():
            with (directory / name).open("wb") as file:
                file.write(_header(members, chosen))
                for expected in members:
                    _, tensor = next(weights)
                    file.write(_bytes(tensor.to(getattr(torch, chosen))))
                    done += width * prod(expected.shape)
                    if progress is not None:
                        progress(done, total)
        files = tuple(sorted((path.name, path.stat().st_size) for path in directory.iterdir()))
    parameters = total // width
    return Converted(Path(destination), chosen, len(tensors), parameters, files, source.vocabulary is not None)


def _auto_dtype(source: Checkpoint) -> str:
    """The dtype of the matrices where all have the same; vectors (norms) are stored in float32 next to any of them."""
    found = {tensor.dtype_name for tensor in source.tensors().values() if len(tensor.shape) > 1}
    return next(iter(found)) if len(found) == 1 and found <= set(FLOAT_DTYPES) else "bfloat16"


def _shards(tensors: list[TensorInfo], width: int, limit: int) -> dict[str, list[TensorInfo]]:
    """File name -> its tensors, in the order of the stream; each file within `limit` where its tensors allow."""
    groups: list[list[TensorInfo]] = [[]]
    size = 0
    for tensor in tensors:
        nbytes = width * prod(tensor.shape)
        if groups[-1] and size + nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": group for number, group in enumerate(groups, 1)}


def _header(tensors: list[TensorInfo], dtype: str) -> bytes:
    """The bytes before the data of a safetensors file that holds `tensors` in this order."""
    code, width = next((code, width) for code, (name, width) in DTYPES.items() if name == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        end = begin + width * prod(tensor.shape)
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8, as the format asks of writers
    return len(text).to_bytes(8, "little") + text


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _write_tokenizer(source: GgufCheckpoint, directory: Path) -> None:
    (directory / "tokenizer.json").write_text(source.tokenizer().to_str(pretty=True), "utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **source.special_tokens,
    }
    if source.chat_template is not None:
        config["chat_template"] = source.chat_template
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


@contextmanager
def _appearing(destination: Path, needed: int, name: str) -> Iterator[Path]:
    """A new directory beside `destination` to write into; renamed to it when the block ends well, removed when not."""
    subject = f"convert {name!r} to {str(destination)!r}"
    # A link to an empty directory is filled where it leads.
    final = Path(os.path.realpath(destination.expanduser()))
    work = final.parent / f".{final.name}.{secrets.token_hex(4)}.partial"
    try:
        _check_destination(final, needed, subject)
        try:
            work.mkdir()
            yield work
            if final.exists():
                final.rmdir()
            work.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(subject, _disk_full(final, needed)) from None
        fix = "check the path and its permissions; nothing of the conversion was left behind"
        raise CheckpointError(subject, Problem("", f"cannot be written: {error.strerror or error}", fix)) from None


def _check_destination(final: Path, needed: int, subject: str) -> None:
    if not final.parent.is_dir():
        raise CheckpointError(subject, Problem("", f"there is no directory {str(final.parent)!r}", "create it first"))
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        says = "is a directory with files in it" if final.is_dir() else "is a file"
        raise CheckpointError(subject, Problem(str(final), says, "name a new directory, or an empty one"))
    if shutil.disk_usage(final.parent).free < needed:
        raise CheckpointError(subject, _disk_full(final, needed))


def _disk_full(final: Path, needed: int) -> Problem:
    free = shutil.disk_usage(final.parent).free
    says = f"the disk is full: about {needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free"
    return Problem(str(final.parent), says, "free some space, or name a directory on another disk")
