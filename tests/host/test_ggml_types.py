"""ggml types: every one that gguf.quants dequantises gives exactly its values, through a file and our own kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants
from torchplug.host import ggml_types
from torchplug.host.ggml_types import TYPES, dequantise, undequantisable
from torchplug.host.gguf_file import GgufFile


def _dequantisable(kind: GGMLQuantizationType) -> bool:
    try:
        quants.dequantize(numpy.zeros((1, GGML_QUANT_SIZES[kind][1]), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True


QUANTISED = [kind for kind in GGMLQuantizationType if GGML_QUANT_SIZES[kind][0] > 1 and _dequantisable(kind)]


def blocks_of(kind: GGMLQuantizationType, rows: int, columns: int) -> numpy.ndarray:
    """Random blocks [rows, bytes]: quantised where gguf can, else random bytes with a float16 scale that is finite."""
    random = numpy.random.default_rng(int(kind))
    try:
        return quants.quantize(random.standard_normal((rows, columns)).astype(numpy.float32), kind)
    except NotImplementedError:
        block, nbytes = GGML_QUANT_SIZES[kind]
        raw = random.integers(0, 256, (rows, columns // block * nbytes), numpy.uint8)
        # Clearing the top exponent bit of every byte keeps each float16 finite, wherever a type has its scales.
        raw[:, 1::2] &= 0xBF
        raw[:, 0::2] &= 0xBF
        return raw


def test_the_table_is_ggufs() -> None:
    ours = {kind.id: (kind.name, kind.block, kind.nbytes) for kind in TYPES.values()}
    assert ours == {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
    assert {kind.name for kind in QUANTISED} >= set(ggml_types._TORCH_KERNELS)
    assert len(QUANTISED) >= 20


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_values_equal_gguf_quants_bit_by_bit(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    raw = blocks_of(kind, 7, 512)
    writer = GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("before", numpy.ones(3, numpy.float32))
    writer.add_tensor("x", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "x.gguf")
    tensor = file.tensors["x"]
    assert tensor.shape == (7, 512) and tensor.kind.name == kind.name
    assert undequantisable([tensor.kind], "x") == []
    expected = torch.from_numpy(quants.dequantize(raw, kind))
    values = dequantise(file.raw(tensor), tensor.kind, tensor.shape, torch.float32)
    assert expected.isfinite().all() and expected.unique().numel() > 2
    assert torch.equal(values, expected)
    rounded = dequantise(file.raw(tensor), tensor.kind, tensor.shape, torch.bfloat16)
    assert torch.equal(rounded, expected.bfloat16())


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "Q5_1"])
def test_a_tensor_of_many_chunks_equals_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(blocks_of(GGMLQuantizationType[kind], 5, 768)).reshape(-1)
    ours = next(entry for entry in TYPES.values() if entry.name == kind)
    whole = dequantise(raw, ours, (5, 768), torch.float32)
    monkeypatch.setattr(ggml_types, "_CHUNK", 512)
    assert torch.equal(dequantise(raw, ours, (5, 768), torch.float32), whole)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"])
def test_plain_types_are_viewed_not_interpreted(name: str) -> None:
    kind = next(entry for entry in TYPES.values() if entry.name == name)
    dtype = getattr(torch, kind.plain or "")
    values = torch.arange(-3, 3).reshape(2, 3).to(dtype)
    raw = values.reshape(-1).view(torch.uint8)
    same = dequantise(raw, kind, (2, 3), dtype)
    assert torch.equal(same, values)
    assert same.data_ptr() == raw.data_ptr()
    other = dequantise(raw, kind, (2, 3), torch.float32)
    assert other.dtype == (torch.float32 if dtype.is_floating_point else dtype)


def test_without_the_gguf_package_common_types_work_and_others_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {kind.name: kind for kind in TYPES.values()}
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert undequantisable([kinds[name] for name in ("F32", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")], "x") == []
    (problem,) = undequantisable([kinds["Q4_1"], kinds["Q5_0"], kinds["IQ1_S"]], "model.gguf")
    assert problem.where == "model.gguf"
    assert "IQ1_S, Q5_0" in problem.says
    assert problem.fix == 'pip install "torchplug[gguf]"'


def test_a_type_that_gguf_cannot_dequantise_is_refused_before_reading() -> None:
    (problem,) = undequantisable([kind for kind in TYPES.values() if kind.name == "Q8_K"], "model.gguf")
    assert "Q8_K" in problem.says
