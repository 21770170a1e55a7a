"""safetensors files: every dtype is read as stored, and a header that does not fit its file is refused by name."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torchplug.errors import CheckpointError, Problem
from torchplug.host.safetensors_file import DTYPES, read_header, read_tensors
from torchplug.host.untrusted import MOST_PROBLEMS


def store(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """A file with `header` (JSON-dumped unless bytes) and `data`; `length` overrides the declared header length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def problems_of(path: Path) -> list[Problem]:
    problems: list[Problem] = []
    read_header(path, problems)
    return problems


TORCH_DTYPES = [getattr(torch, name) for name, _ in DTYPES.values()]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype_is_read_as_stored_also_empty_and_scalar(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(3, 0, 2).to(dtype),
    }
    path = tmp_path / "x.safetensors"
    save_file(saved, path)
    problems: list[Problem] = []
    header = read_header(path, problems)
    assert problems == []
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in header.items()} == {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in saved.items()
    }
    read = dict(read_tensors(path, header))
    for name, tensor in saved.items():
        assert read[name].dtype == dtype
        assert read[name].shape == tensor.shape
        assert torch.equal(read[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_our_list_of_dtypes_is_the_librarys() -> None:
    from safetensors.torch import _TYPES

    assert {code: getattr(torch, name) for code, (name, _) in DTYPES.items()} == _TYPES
    assert all(getattr(torch, name).itemsize == width for name, width in DTYPES.values())


@pytest.mark.parametrize("length", [640, 0x280 + 0x100, 0x480])
def test_a_header_length_that_looks_like_a_pickle_is_a_header_length(tmp_path: Path, length: int) -> None:
    raw = json.dumps({"a": entry()}).encode().ljust(length)
    assert struct.pack("<Q", length)[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04")
    assert problems_of(store(tmp_path / "x", raw, bytes(8))) == []


def test_a_file_without_tensors_is_legal(tmp_path: Path) -> None:
    path = store(tmp_path / "x", {"__metadata__": {"format": "pt"}})
    assert problems_of(path) == []


def test_reading_maps_the_file_and_does_not_copy_it(tmp_path: Path) -> None:
    size = 256 << 20
    path = tmp_path / "x"
    store(path, {"a": entry("U8", [size], [0, size])})
    os.truncate(path, path.stat().st_size + size)
    before = int(Path("/proc/self/statm").read_text().split()[1])
    ((_, tensor),) = read_tensors(path, read_header(path, []))
    assert tensor.nbytes == size
    grown = int(Path("/proc/self/statm").read_text().split()[1]) - before
    assert grown * resource.getpagesize() < 32 << 20


REFUSED = {
    "prefix cut": (b"\x10\0\0", "at least 8"),
    "nothing": (b"", "at least 8"),
    "length beyond the file": (struct.pack("<Q", 90_000_000) + b"{}", "90,000,000 bytes, but only 2 follow"),
    "length beyond the format": (struct.pack("<Q", 2**63) + b"{}", "the format allows 100,000,000"),
    "not an object": (b"\2\0\0\0\0\0\0\0[]", "does not start with {"),
    "not JSON": (b"\7\0\0\0\0\0\0\0{'a':1}", "line 1, column 2"),
    "not UTF-8": (b"\4\0\0\0\0\0\0\0{\xff\xff}", "not UTF-8"),
    "utf-16": (struct.pack("<Q", 4) + "{}".encode("utf-16-le"), "not valid JSON"),
    "nested": (struct.pack("<Q", 200_000) + b'{"a":' * 40_000, "nested too deeply"),
    "a pickle": (b"PK\x03\x04" + bytes(60), "is a pickle"),
    "long number": (struct.pack("<Q", 5007) + b'{"a":[' + b"9" * 5000 + b"]", "is not"),
}


@pytest.mark.parametrize("raw, says", REFUSED.values(), ids=REFUSED)
def test_a_broken_header_is_refused_and_the_file_named(tmp_path: Path, raw: bytes, says: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(raw)
    (problem,) = problems_of(path)
    assert str(path) in problem.where
    assert says in problem.says
    assert problem.fix


BAD_ENTRIES = {
    "unknown dtype": (entry("F12"), "has dtype 'F12'"),
    "dtype of another kind": (entry(3), "has dtype"),  # type: ignore[arg-type]
    "negative size": (entry(shape=[-2]), "none negative"),
    "true as a size": (entry(shape=[True, 2]), "none negative"),
    "fraction as a size": (entry(shape=[2.0]), "none negative"),
    "shape no list": (entry(shape=2), "expected a list"),
    "too little data": (entry(shape=[3]), "does not fill its 8 bytes"),
    "too much data": (entry(shape=[1]), "does not fill its 8 bytes"),
    "size wraps in 64 bits": (entry(shape=[2**62, 4]), "2**63 or more elements"),
    "many sizes": (entry(shape=[2**60] * 5000), "2**63 or more elements"),
    "absurd beside zero": (entry(shape=[2**63, 0], offsets=[0, 0]), "2**63 or more elements"),
    "end before begin": (entry(offsets=[8, 0]), "outside the file's 8 bytes"),
    "end outside the file": (entry(shape=[2**40], offsets=[0, 2**42]), "outside the file's 8 bytes"),
    "begin negative": (entry(offsets=[-8, 0]), "outside the file's 8 bytes"),
    "three offsets": (entry(offsets=[0, 4, 8]), "two whole numbers"),
    "offset a fraction": (entry(offsets=[0, 8.0]), "two whole numbers"),
    "missing key": ({"dtype": "F32", "shape": [2]}, "exactly dtype, shape and data_offsets"),
    "another key": (entry() | {"stride": [1]}, "exactly dtype, shape and data_offsets"),
    "no object": ([1, 2], "exactly dtype, shape and data_offsets"),
}


@pytest.mark.parametrize("bad, says", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_bad_entry_is_refused_and_the_tensor_named(tmp_path: Path, bad: Any, says: str) -> None:
    path = store(tmp_path / "x", {"good.weight": entry(), "bad.weight": bad}, bytes(8))
    (problem,) = problems_of(path)
    assert str(path) in problem.where and "'bad.weight'" in problem.where
    assert says in problem.says


LAYOUTS = {
    "gap": ({"a": entry(), "b": entry(offsets=[12, 20])}, 20, "leaves a gap after tensor 'a'"),
    "gap at the start": ({"a": entry(offsets=[4, 12])}, 12, "leaves a gap after the start"),
    "overlap": ({"a": entry(), "b": entry(offsets=[4, 12])}, 12, "overlaps tensor 'a'"),
    "the same bytes twice": ({"a": entry(), "b": entry()}, 8, "overlaps tensor 'a'"),
    "bytes left over": ({"a": entry()}, 12, "end at byte 8"),
}


@pytest.mark.parametrize("header, size, says", LAYOUTS.values(), ids=LAYOUTS)
def test_tensors_must_cover_the_data_exactly(tmp_path: Path, header: Any, size: int, says: str) -> None:
    (problem,) = problems_of(store(tmp_path / "x", header, bytes(size)))
    assert says in problem.says


def test_names_that_cannot_be_printed_or_occur_twice_are_refused(tmp_path: Path) -> None:
    (lone,) = problems_of(store(tmp_path / "x", {"\ud800": entry()}, bytes(8)))
    assert "not valid Unicode" in lone.says
    str(CheckpointError("x", lone)).encode()
    twice = b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}"
    (problem,) = problems_of(store(tmp_path / "y", twice, bytes(8)))
    assert "'a' occurs twice" in problem.says


def test_a_million_problems_are_counted_not_listed(tmp_path: Path) -> None:
    problems = problems_of(store(tmp_path / "x", {f"t{number}": 0 for number in range(5000)}))
    assert len(problems) == MOST_PROBLEMS + 1
    assert f"{5000 - MOST_PROBLEMS} further" in problems[-1].says


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6),
    cut=st.one_of(st.none(), st.integers(0, 10**6)),
    more=st.binary(max_size=4),
)
def test_a_damaged_file_is_refused_or_read_but_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]], cut: int | None, more: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    sample = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(7)}
    save_file(sample, path, {"format": "pt"})
    raw = bytearray(path.read_bytes())
    for position, value in flips:
        raw[position % len(raw)] = value
    path.write_bytes((raw if cut is None else raw[: cut % len(raw)]) + more)
    tracemalloc.start()
    problems: list[Problem] = []
    try:
        header = read_header(path, problems)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    if problems:
        str(CheckpointError("x", problems)).encode()
        return
    try:
        assert sum(tensor.nbytes for _, tensor in read_tensors(path, header)) <= len(raw)
    except CheckpointError as error:
        str(error).encode()


HOSTILE_UNDER_A_MEMORY_LIMIT = """
import resource, sys
from pathlib import Path
import torch, safetensors
from torchplug.errors import CheckpointError
from torchplug.host.safetensors_file import read_header
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for path in sys.argv[1:]:
    problems = []
    read_header(Path(path), problems)
    assert problems, path
print("refused", len(sys.argv) - 1)
"""


def test_what_a_hostile_header_claims_is_never_allocated(tmp_path: Path) -> None:
    """In a process that may take 64 MiB more: claims of terabytes, in files that are small or sparse."""
    size = 2**40
    files = [
        store(tmp_path / "header", b"{}", length=99_000_000),
        store(tmp_path / "tensor", {"a": entry("U8", [size], [0, size])}),
        store(tmp_path / "shape", {"a": entry("F32", [2**20] * 4, [0, 8])}, bytes(8)),
    ]
    sparse = store(tmp_path / "sparse", {"a": entry("F64", [size // 8 + 1], [0, size + 8])})
    os.truncate(sparse, sparse.stat().st_size + 2**34)
    files.append(sparse)
    result = subprocess.run(
        [sys.executable, "-c", HOSTILE_UNDER_A_MEMORY_LIMIT, *map(str, files)], capture_output=True, text=True
    )
    assert result.stdout == f"refused {len(files)}\n", result.stderr
