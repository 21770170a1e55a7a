"""One safetensors file: its header checked before anything is allocated, its tensors mapped from disk.

Format: https://github.com/huggingface/safetensors#format. 8 bytes (little-endian header length), a JSON header, then
the data, which the tensors' ranges cover without a gap or an overlap. The `safetensors` library reads the tensors; the
header is checked here first, so that a damaged or hostile file is refused with the name of the file, the tensor and
the numbers that do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchplug.errors import CheckpointError, Problem
from torchplug.host.untrusted import first_of, parse_json_object, regular_file_size, shown

if TYPE_CHECKING:
    from torch import Tensor

# The format's own limit on the header.
MOST_HEADER_BYTES = 100_000_000

# dtype in the file -> (name of the torch dtype, bytes per element)
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}

_COPY_AGAIN = "the file is damaged or incomplete: copy or download it again"
# First bytes of pytorch files, which are at times renamed to .safetensors. They decide nothing by themselves: a header
# of 640 bytes begins with the same two.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a header: `dtype` is the torch name, `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path, problems: list[Problem]) -> dict[str, StoredTensor]:
    """The tensors that `path` declares, in the order of their data; what is wrong is added to `problems`.

    Only the header is read. A file with any problem yields the entries that are sound by themselves, so that a missing
    tensor is not reported a second time; such a file must not be read further.
    """
    try:
        size = regular_file_size(path)
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            says = _bad_length(prefix, length, size)
            if says and prefix.startswith(_PICKLES):
                says = "is a pickle (pytorch) file named as a safetensors file; pickle can run code and is never opened"
                problems.append(Problem(str(path), says, _CONVERT))
                return {}
            if says:
                problems.append(Problem(str(path), says, _COPY_AGAIN))
                return {}
            raw = file.read(length)
    except OSError as error:
        says = f"cannot be read: {error.strerror or error}"
        problems.append(Problem(str(path), says, "check the file and its permissions"))
        return {}
    # A file may declare a header, then end before it (it shrank between the two looks).
    header, says = parse_json_object(raw) if len(raw) == length and raw[:1] == b"{" else (None, "does not start with {")
    if header is None:
        problems.append(Problem(str(path), f"its header {says}", _COPY_AGAIN))
        return {}
    header.pop("__metadata__", None)
    found: list[StoredTensor] = []
    wrong: list[Problem] = []
    for name, entry in header.items():
        tensor = _checked(name, entry, size - 8 - length)
        if isinstance(tensor, str):
            wrong.append(Problem(f"{path}, tensor {shown(name)}", tensor, _COPY_AGAIN))
        else:
            found.append(tensor)
    found.sort(key=lambda tensor: (tensor.begin, tensor.end))
    if not wrong:
        wrong = _uncovered(path, found, size - 8 - length)
    problems.extend(first_of(wrong))
    return {tensor.name: tensor for tensor in found}


def read_tensors(path: Path, tensors: dict[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file whose header was found sound, in the order of `tensors`: CPU tensors that map the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in tensors:
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"weights file {str(path)!r}", Problem("", f"cannot be read: {error}", _COPY_AGAIN)
        ) from None


_CONVERT = (
    "convert it to safetensors where you trust it: `model.save_pretrained(DIR)` in transformers writes safetensors"
)


def _bad_length(prefix: bytes, length: int, size: int) -> str:
    if len(prefix) < 8:
        return f"has {size} bytes; a safetensors file has at least 8"
    if length > MOST_HEADER_BYTES:
        return f"declares a header of {length:,} bytes; the format allows {MOST_HEADER_BYTES:,}"
    if length > size - 8:
        return f"declares a header of {length:,} bytes, but only {size - 8:,} follow"
    return ""


def _checked(name: str, entry: Any, data_bytes: int) -> StoredTensor | str:
    """The entry as a StoredTensor, or what is wrong with it."""
    if any("\ud800" <= character <= "\udfff" for character in name):
        return "its name is not valid Unicode"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "its entry must have exactly dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        return f"has dtype {shown(dtype)}; readable are {', '.join(DTYPES)}"
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return f"has shape {shown(shape)}; expected a list of whole numbers, none negative"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        return f"has data_offsets {shown(offsets)}; expected two whole numbers"
    begin, end = offsets
    if not 0 <= begin <= end <= data_bytes:
        return f"lies at bytes {shown(begin)} to {shown(end)}, outside the file's {data_bytes:,} bytes of data"
    torch_name, width = DTYPES[dtype]
    elements = 1
    for size in shape:
        elements *= size or 1
        if elements >= 2**63:  # torch counts in 64 bits; stop here, or a long list of large sizes is a big-integer bomb
            return f"has shape {shown(shape)}, of 2**63 or more elements"
    if (0 if 0 in shape else elements * width) != end - begin:
        return f"has shape {shown(shape)} of {dtype}, which does not fill its {end - begin:,} bytes exactly"
    return StoredTensor(name, torch_name, tuple(shape), begin, end)


def _uncovered(path: Path, tensors: list[StoredTensor], data_bytes: int) -> list[Problem]:
    """Gaps and overlaps: the format demands that the tensors cover the data exactly."""
    wrong: list[Problem] = []
    expected, before = 0, "the start of the data"
    for tensor in tensors:
        if tensor.begin != expected:
            what = "overlaps" if tensor.begin < expected else "leaves a gap after"
            says = f"begins at byte {tensor.begin:,} and {what} {before}, which ends at byte {expected:,}"
            wrong.append(Problem(f"{path}, tensor {shown(tensor.name)}", says, _COPY_AGAIN))
        expected, before = max(expected, tensor.end), f"tensor {shown(tensor.name)}"
    if expected != data_bytes:
        says = f"its tensors end at byte {expected:,} of the data, the file at byte {data_bytes:,}"
        wrong.append(Problem(str(path), says, _COPY_AGAIN))
    return wrong
