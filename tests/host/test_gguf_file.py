"""GGUF files: metadata and tensors as gguf wrote them, and a header that does not fit its file refused by name."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from gguf import GGUFEndian, GGUFReader, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchplug.errors import CheckpointError
from torchplug.host.checkpoint import open_checkpoint
from torchplug.host.demo import find_demo_model
from torchplug.host.gguf_file import GgufFile

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str | bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def store(
    path: Path,
    keys: list[bytes] = [],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    data: int = 0,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    """A file made of these entries and `data` zero bytes after the padding; `counts` overrides (tensors, keys)."""
    raw = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(keys)))) + b"".join(keys + tensors)
    path.write_bytes(raw + bytes(-len(raw) % 32 + data))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        GgufFile(path)
    assert str(path) in str(caught.value)
    assert all(problem.fix for problem in caught.value.problems)
    str(caught.value).encode()
    return str(caught.value)


def test_all_kinds_of_metadata_come_back(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -128)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -32768)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 1e-5)
    writer.add_float64("f64", 1e-300)
    writer.add_bool("yes", True)
    writer.add_string("text", "mélange 😀\0")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.0])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["a", "", "日本"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = GgufFile(tmp_path / "x.gguf")
    assert [file.integer(name) for name in ("u8", "i8", "u16", "i16")] == [255, -128, 65535, -32768]
    assert [file.integer(name) for name in ("u32", "i32", "u64", "i64")] == [2**32 - 1, -(2**31), 2**64 - 1, -(2**63)]
    # The decimal number that was written, not its float32 neighbour 9.999999747378752e-06.
    assert (file.number("f32"), file.number("f64"), file.flag("yes")) == (1e-5, 1e-300, True)
    assert file.text("text") == "mélange 😀\0"
    assert list(file.numbers("ints") or ()) == [1, -2, 3]
    assert list(file.numbers("floats") or ()) == [0.5, -1.0]
    assert list(file.numbers("flags") or ()) == [1, 0]
    assert (file.texts("words"), file.count("words")) == (["a", "", "日本"], 3)
    assert "words" in file and "other" not in file
    for absent in (file.integer, file.number, file.flag, file.text, file.texts, file.numbers, file.count):
        assert absent("other") is None


@pytest.mark.parametrize(
    "value", [1e-5, 0.1, 3.4028234663852886e38, 1.1754943508222875e-38, 123456.789, float("inf"), 1 / 3]
)
def test_a_float32_is_the_shortest_decimal_of_its_value(tmp_path: Path, value: float) -> None:
    file = GgufFile(store(tmp_path / "x", [key("f", F32, struct.pack("<f", value))]))
    found = file.number("f")
    assert found is not None
    assert numpy.float32(found) == numpy.float32(value)
    assert len(repr(found)) <= len(repr(float(numpy.float32(value))))


def test_asking_for_another_kind_names_the_key(tmp_path: Path) -> None:
    file = GgufFile(store(tmp_path / "x", [key("k", STRING, text("7")), key("n", U32, struct.pack("<I", 7))]))
    for ask, name in ((file.integer, "k"), (file.number, "k"), (file.flag, "n"), (file.text, "n"), (file.texts, "k")):
        with pytest.raises(CheckpointError, match=f"'{name}' is not"):
            ask(name)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(tmp_path: Path, version: int) -> None:
    file = GgufFile(store(tmp_path / "x", [], [tensor("a", (3, 2), 0, 0)], 24, version=version))
    assert file.tensors["a"].shape == (2, 3)


def test_an_alignment_other_than_the_default_is_kept(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_custom_alignment(256)
    writer.add_string("filler", "x" * 100)
    values = {name: numpy.random.default_rng(0).standard_normal((3, 5)).astype(numpy.float32) for name in "abc"}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "x.gguf")
    for name, value in values.items():
        assert file.tensors[name].start % 256 == 0
        assert torch.equal(file.raw(file.tensors[name]).view(torch.float32).view(3, 5), torch.from_numpy(value))


def test_scalars_and_empty_tensors_are_legal(tmp_path: Path) -> None:
    file = GgufFile(store(tmp_path / "x", [], [tensor("s", (), 0, 0), tensor("e", (0, 4), 0, 32)], 64))
    assert file.tensors["s"].shape == () and file.tensors["s"].nbytes == 4
    assert file.raw(file.tensors["e"]).numel() == 0


NUMBER = struct.pack("<I", 1)
HEADERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "does not start with GGUF"),
    "another format": (lambda path: path.write_bytes(b"PK\x03\x04" + bytes(99)), "does not start with GGUF"),
    "cut in the counts": (lambda path: path.write_bytes(b"GGUF\3\0\0\0"), "inside its header"),
    "version 1": (lambda path: store(path, version=1), "version 1"),
    "version of the future": (lambda path: store(path, version=4), "version 4"),
    "big endian": (lambda path: store(path, version=3 << 24), "big-endian"),
    "many keys": (lambda path: store(path, counts=(0, 2**60)), "1,152,921,504,606,846,976 metadata keys"),
    "many tensors": (lambda path: store(path, counts=(2**63, 0)), "9,223,372,036,854,775,808 tensors"),
    "a key too few": (lambda path: store(path, [key("a", U32, NUMBER)] * 1, counts=(0, 2)), "metadata key 1"),
    "long key": (lambda path: store(path, [text("k" * 65536)]), "65,536 bytes long"),
    "key beyond the file": (lambda path: store(path, [struct.pack("<Q", 2**63)], data=64), "inside metadata key 0"),
    "key not UTF-8": (lambda path: store(path, [key(b"\xff", U32, NUMBER)]), "metadata key 0 is not UTF-8"),
    "key twice": (lambda path: store(path, [key("a", U32, NUMBER)] * 2), "'a' twice"),
    "unknown type": (lambda path: store(path, [key("a", 13, NUMBER)]), "value type 13"),
    "string beyond": (
        lambda path: store(path, [key("a", STRING, struct.pack("<Q", 2**40))]),
        "1,099,511,627,776 bytes",
    ),
    "array beyond": (
        lambda path: store(path, [key("a", ARRAY, struct.pack("<IQ", I32, 2**61))]),
        "inside the metadata",
    ),
    "strings beyond": (
        lambda path: store(path, [key("a", ARRAY, struct.pack("<IQ", STRING, 2**61))]),
        "inside the metadata",
    ),
    "string in array": (
        lambda path: store(path, [key("a", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63))]),
        "its strings would end at byte",
    ),
    "array of arrays": (lambda path: store(path, [key("a", ARRAY, struct.pack("<IQ", ARRAY, 0))]), "array of arrays"),
    "array of unknown": (lambda path: store(path, [key("a", ARRAY, struct.pack("<IQ", 99, 0))]), "value type 99"),
    "alignment zero": (lambda path: store(path, [key("general.alignment", U32, bytes(4))]), "general.alignment is 0"),
    "alignment odd": (lambda path: store(path, [key("general.alignment", U32, b"\x18\0\0\0")]), "alignment is 24"),
    "alignment a text": (lambda path: store(path, [key("general.alignment", STRING, text("32"))]), "whole number"),
    "rank": (lambda path: store(path, [], [tensor("a", (1,) * 5, 0, 0)]), "5 dimensions"),
    "absurd rank": (lambda path: store(path, [], [text("a") + b"\xff\xff\xff\xff"], 64), "4,294,967,295 dimensions"),
    "name beyond": (lambda path: store(path, [], [struct.pack("<Q", 2**50)], 64), "the name of tensor 0"),
}


@pytest.mark.parametrize("make, says", HEADERS.values(), ids=HEADERS)
def test_a_broken_header_is_refused_and_the_file_named(tmp_path: Path, make: Callable[[Path], Any], says: str) -> None:
    make(tmp_path / "x")
    assert says in refusal(tmp_path / "x")


TENSORS: dict[str, tuple[list[bytes], int, str]] = {
    "unknown type": ([tensor("bad", (2,), 99, 0)], 64, "type 99"),
    "removed type": ([tensor("bad", (32,), 4, 0)], 64, "type 4"),
    "beyond the file": ([tensor("bad", (2**20,), 0, 0)], 64, "the file has"),
    "offset beyond": ([tensor("bad", (2,), 0, 2**63)], 64, "the file has"),
    "wraps in 64 bits": ([tensor("bad", (2**32, 2**32), 0, 0)], 64, "2**63 or more"),
    "absurd beside zero": ([tensor("bad", (0, 2**63), 0, 0)], 64, "2**63 or more"),
    "part of a block": ([tensor("bad", (33, 2), 3, 0)], 64, "blocks of 32"),
    "not aligned": ([tensor("bad", (2,), 0, 4)], 64, "multiple of the file's alignment"),
    "twice": ([tensor("bad", (2,), 0, 0), tensor("bad", (2,), 0, 32)], 64, "occurs twice"),
    "overlap": ([tensor("good", (16,), 0, 0), tensor("bad", (16,), 0, 32)], 96, "overlaps tensor 'good'"),
    "same place": ([tensor("good", (4,), 0, 0), tensor("bad", (4,), 0, 0)], 96, "overlaps tensor 'good'"),
}


@pytest.mark.parametrize("entries, data, says", TENSORS.values(), ids=TENSORS)
def test_a_bad_tensor_is_refused_and_named(tmp_path: Path, entries: list[bytes], data: int, says: str) -> None:
    message = refusal(store(tmp_path / "x", [], entries, data))
    assert "'bad'" in message and says in message


def test_all_bad_tensors_are_one_error(tmp_path: Path) -> None:
    entries = [tensor("one", (2**20,), 0, 0), tensor("fine", (2,), 0, 0), tensor("two", (33,), 3, 32)]
    message = refusal(store(tmp_path / "x", [], entries, 64))
    assert "2 problems" in message and "'one'" in message and "'two'" in message and "'fine'" not in message


def test_a_real_big_endian_file_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(str(tmp_path / "x.gguf"), "llama", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "big-endian" in refusal(tmp_path / "x.gguf")


def test_a_string_that_is_not_utf8_is_named_when_it_is_read(tmp_path: Path) -> None:
    array = struct.pack("<IQ", STRING, 2) + text("fine") + text(b"\xff\xfe")
    file = GgufFile(store(tmp_path / "x", [key("t", STRING, text(b"\xc0")), key("a", ARRAY, array)]))
    with pytest.raises(CheckpointError, match="string 1 of 'a' is not UTF-8"):
        file.texts("a")
    with pytest.raises(CheckpointError, match="under 't' is not UTF-8"):
        file.text("t")


def test_every_truncation_is_refused(tmp_path: Path, write_gguf: Callable[..., Any]) -> None:
    whole, part = tmp_path / "whole.gguf", tmp_path / "part.gguf"
    write_gguf(whole, num_hidden_layers=1)
    raw = whole.read_bytes()
    for size in [*range(0, 2000, 7), *range(2000, len(raw), 997), len(raw) - 1]:
        part.write_bytes(raw[:size])
        refusal(part)


def read_everything(path: Path) -> None:
    """All that a user of a checkpoint can do with it; raises CheckpointError or nothing."""
    checkpoint = open_checkpoint(path)
    size = path.stat().st_size
    for _, values in checkpoint.weights():
        assert values.nbytes <= 32 * size  # the widest quantisation takes 1.56 bits of a value's 32
    _ = (checkpoint.special_tokens, checkpoint.add_bos_token, checkpoint.chat_template, checkpoint.generation_config)
    tokenizer = checkpoint.tokenizer()
    tokenizer.decode(tokenizer.encode("hello world 12 <|a|>").ids)


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory, write_gguf: Callable[..., Any]) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "sound.gguf"
    write_gguf(path, kind="Q4_1", num_hidden_layers=1)
    read_everything(path)
    return path.read_bytes()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    # Most of the file is weights, where every byte is legal: aim at the header.
    flips=st.lists(
        st.tuples(st.integers(0, 9000), st.one_of(st.integers(0, 255), st.just(255))), min_size=1, max_size=5
    ),
    cut=st.one_of(st.none(), st.none(), st.integers(0, 10**5)),
)
def test_a_damaged_file_is_refused_or_read_but_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, sound_file: bytes, flips: list[tuple[int, int]], cut: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    raw = bytearray(sound_file)
    for position, value in flips:
        raw[position % len(raw)] = value
    path.write_bytes(raw if cut is None else raw[: cut % len(raw)])
    tracemalloc.start()
    try:
        GgufFile(path)
    except CheckpointError as error:
        str(error).encode()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20
    try:
        read_everything(path)
    except CheckpointError as error:
        str(error).encode()


HOSTILE_UNDER_A_MEMORY_LIMIT = """
import resource, sys
from pathlib import Path
import torch
from torchplug.errors import CheckpointError
from torchplug.host.gguf_file import GgufFile
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        GgufFile(Path(path))
    except CheckpointError:
        continue
    raise SystemExit(path)
print("refused", len(sys.argv) - 1)
"""


def test_what_a_hostile_header_claims_is_never_allocated(tmp_path: Path) -> None:
    """In a process that may take 64 MiB more."""
    files = [
        store(tmp_path / "keys", counts=(0, 2**62)),
        store(tmp_path / "tensors", counts=(2**62, 0)),
        store(tmp_path / "string", [key("a", STRING, struct.pack("<Q", 2**45))]),
        store(tmp_path / "array", [key("a", ARRAY, struct.pack("<IQ", U64, 2**45))]),
        store(tmp_path / "strings", [key("a", ARRAY, struct.pack("<IQ", STRING, 2**45))]),
        store(tmp_path / "shape", [], [tensor("a", (2**20, 2**20), 0, 0)], 64),
    ]
    result = subprocess.run(
        [sys.executable, "-c", HOSTILE_UNDER_A_MEMORY_LIMIT, *map(str, files)], capture_output=True, text=True
    )
    assert result.stdout == f"refused {len(files)}\n", result.stderr


def test_a_long_string_stays_in_the_file_until_it_is_asked_for(tmp_path: Path) -> None:
    size = 256 << 20
    path = tmp_path / "x"
    raw = b"GGUF" + struct.pack("<IQQ", 3, 0, 2)
    raw += text("a") + struct.pack("<IQ", STRING, size)
    path.write_bytes(raw)
    os.truncate(path, len(raw) + size)  # sparse: 256 MiB of zero bytes
    with path.open("ab") as file:
        file.write(key("b", U32, NUMBER))
    tracemalloc.start()
    file_ = GgufFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert file_.integer("b") == 1
    assert peak < 1 << 20


@pytest.mark.oracle
def test_the_demo_model_reads_as_gguf_reads_it_and_fast() -> None:
    path = find_demo_model()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        file = GgufFile(path)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.15
    reader = GGUFReader(str(path))
    for name, field in reader.fields.items():
        if name.startswith("GGUF."):
            continue
        expected = field.contents()
        if isinstance(expected, list):
            found: Any = file.texts(name) if isinstance(expected[0], str) else list(file.numbers(name) or ())
        else:
            ask = {str: file.text, bool: file.flag, int: file.integer, float: file.number}[type(expected)]
            found = ask(name)
        if isinstance(expected, float):
            assert numpy.float32(found) == numpy.float32(expected)
        else:
            assert found == expected, name
    assert [tensor.name for tensor in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert (ours.start, ours.nbytes, ours.kind.name) == (
            tensor.data_offset,
            tensor.n_bytes,
            tensor.tensor_type.name,
        )
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
    last = reader.tensors[-1]
    assert numpy.array_equal(file.raw(file.tensors[last.name]).numpy(), last.data.reshape(-1).view(numpy.uint8))
