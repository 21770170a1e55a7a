"""One GGUF file: its header parsed with every length checked against the file, its tensors mapped from disk.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. Strings and arrays
stay in the file until they are asked for (a vocabulary is 100,000 strings), so that opening allocates next to nothing,
whatever the header claims.
"""

from __future__ import annotations

import mmap
import struct
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torchplug.errors import CheckpointError, Problem
from torchplug.host.ggml_types import TYPES, GgmlType
from torchplug.host.untrusted import first_of, regular_file_size, shown

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"GGUF"

# Metadata value types: id -> (name, struct format); strings and arrays have no fixed size.
_SCALARS = {
    0: ("uint8", "<B"),
    1: ("int8", "<b"),
    2: ("uint16", "<H"),
    3: ("int16", "<h"),
    4: ("uint32", "<I"),
    5: ("int32", "<i"),
    6: ("float32", "<f"),
    7: ("bool", "<?"),
    10: ("uint64", "<Q"),
    11: ("int64", "<q"),
    12: ("float64", "<d"),
}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_LONGEST_KEY = 65535
_COPY_AGAIN = "the file is damaged or incomplete: copy or download it again"


@dataclass(frozen=True, slots=True)
class _Text:
    """A string still in the file: `length` bytes from `start`."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Array:
    """An array still in the file: `count` elements of value type `element` in bytes `start` to `end`."""

    element: int
    count: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` in torch order (slowest dimension first), `start` in bytes from the start of the file."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GgufFile:
    """The parsed header of `path`. CheckpointError where the file is not sound.

    Attributes:
        tensors: By their names in the file, in the file's order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, GgufTensor] = {}
        self._metadata: dict[str, int | float | bool | _Text | _Array] = {}
        try:
            self._size = regular_file_size(path)
            with path.open("rb") as file:
                if self._size >= 24:
                    # Copy-on-write, never written to: torch asks for writable memory, and the file stays as it is.
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                start = file.read(4)
        except OSError as error:
            self._refuse(f"cannot be read: {error.strerror or error}", "check the file and its permissions")
        if start != MAGIC:
            self._refuse(f"does not start with {MAGIC.decode()}, as every GGUF file does", "name a GGUF file")
        if self._size < 24:
            self._refuse(f"ends after {self._size} bytes, inside its header")
        self._parse()

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def integer(self, key: str) -> int | None:
        """The whole number under `key`, or None where the key is absent."""
        value = self._metadata.get(key)
        if value is not None and type(value) is not int:
            self._unexpected(key, "a whole number")
        return value

    def number(self, key: str) -> float | None:
        """The number under `key`, or None where the key is absent."""
        value = self._metadata.get(key)
        if value is not None and type(value) not in (int, float):
            self._unexpected(key, "a number")
        return value  # type: ignore[return-value]

    def flag(self, key: str) -> bool | None:
        """The truth value under `key`, or None where the key is absent."""
        value = self._metadata.get(key)
        if value is not None and type(value) is not bool:
            self._unexpected(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """The string under `key`, or None where the key is absent."""
        value = self._metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, _Text):
            self._unexpected(key, "a string")
        return self._decoded(value, f"the string under {shown(key)}")

    def texts(self, key: str) -> list[str] | None:
        """The strings under `key`, or None where the key is absent. Decoded anew at each call."""
        value = self._metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, _Array) or value.element != _STRING:
            self._unexpected(key, "an array of strings")
        found: list[str] = []
        raw, position, length_at = self._map[value.start : value.end], 0, struct.Struct("<Q").unpack_from
        try:
            for _ in range(value.count):
                (length,) = length_at(raw, position)
                position += 8 + length
                found.append(str(raw[position - length : position], "utf-8"))
        except UnicodeDecodeError:
            self._refuse(f"string {len(found)} of {shown(key)} is not UTF-8 text")
        return found

    def numbers(self, key: str) -> array[Any] | None:
        """The numbers under `key`, or None where the key is absent."""
        value = self._metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, _Array) or value.element not in _SCALARS:
            self._unexpected(key, "an array of numbers")
        code = _SCALARS[value.element][1][1]
        found = array("B" if code == "?" else code)
        found.frombytes(self._map[value.start : value.end])
        if sys.byteorder == "big":
            found.byteswap()
        return found

    def count(self, key: str) -> int | None:
        """How many elements the array under `key` has, without decoding it; None where the key is absent."""
        value = self._metadata.get(key)
        if value is not None and not isinstance(value, _Array):
            self._unexpected(key, "an array")
        return None if value is None else value.count

    def raw(self, tensor: GgufTensor) -> Tensor:
        """The tensor's bytes, uint8 [nbytes], mapped from the file."""
        import torch

        if not tensor.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.start)

    # -- parsing: each step knows `position` and checks what it needs against what is left

    def _parse(self) -> None:
        version, tensor_count, key_count = struct.unpack_from("<IQQ", self._map, 4)
        if version & 0xFFFF == 0 and version:
            fix = (
                "convert it on a little-endian machine, e.g. with `gguf-convert-endian FILE little` of the gguf package"
            )
            self._refuse("is a big-endian GGUF file; only little-endian ones are read", fix)
        if version not in (2, 3):
            self._refuse(
                f"is GGUF version {version}; versions 2 and 3 are read", "convert the model again with a current tool"
            )
        position = 24
        # The smallest possible key takes 13 bytes, the smallest tensor entry 24: a count beyond that is a lie.
        for count, least, what in ((key_count, 13, "metadata keys"), (tensor_count, 24, "tensors")):
            if count > (self._size - position) // least:
                self._refuse(f"declares {count:,} {what}, more than its {self._size:,} bytes can hold")
        for number in range(key_count):
            position = self._parse_key(position, number)
        entries: list[tuple[str, tuple[int, ...], int, int]] = []
        for number in range(tensor_count):
            position = self._parse_tensor(position, number, entries)
        self._place(entries, position)

    def _need(self, position: int, length: int, what: str) -> None:
        if length > self._size - position:
            left = max(self._size - position, 0)
            self._refuse(f"ends inside {what}: {length:,} bytes are declared at byte {position:,}, {left:,} are left")

    def _string_at(self, position: int, what: str) -> tuple[_Text, int]:
        self._need(position, 8, what)
        (length,) = struct.unpack_from("<Q", self._map, position)
        self._need(position + 8, length, what)
        return _Text(position + 8, length), position + 8 + length

    def _decoded(self, text: _Text, what: str) -> str:
        try:
            return str(self._map[text.start : text.start + text.length], "utf-8")
        except UnicodeDecodeError:
            self._refuse(f"{what} is not UTF-8 text")

    def _parse_key(self, position: int, number: int) -> int:
        text, position = self._string_at(position, f"metadata key {number}")
        if text.length > _LONGEST_KEY:
            self._refuse(f"metadata key {number} is {text.length:,} bytes long; {_LONGEST_KEY:,} are allowed")
        key = self._decoded(text, f"the name of metadata key {number}")
        what = f"the metadata under {shown(key)}"
        if not key:
            self._refuse(f"metadata key {number} has no name")
        if key in self._metadata:
            self._refuse(f"has the metadata key {shown(key)} twice")
        self._need(position, 4, what)
        (kind,) = struct.unpack_from("<I", self._map, position)
        position += 4
        if kind == _STRING:
            self._metadata[key], position = self._string_at(position, what)
        elif kind == _ARRAY:
            self._metadata[key], position = self._array_at(position, what)
        elif kind in _SCALARS:
            form = _SCALARS[kind][1]
            self._need(position, struct.calcsize(form), what)
            (value,) = struct.unpack_from(form, self._map, position)
            self._metadata[key] = _decimal(value) if form == "<f" else value
            position += struct.calcsize(form)
        else:
            self._refuse(f"{what} has the unknown value type {kind}")
        return position

    def _array_at(self, position: int, what: str) -> tuple[_Array, int]:
        self._need(position, 12, what)
        element, count = struct.unpack_from("<IQ", self._map, position)
        position += 12
        if element in _SCALARS:
            end = position + count * struct.calcsize(_SCALARS[element][1])
            self._need(position, end - position, what)
        elif element == _STRING:
            self._need(position, 8 * count, what)
            end = self._past_strings(position, count, what)
        elif element == _ARRAY:
            self._refuse(f"{what} is an array of arrays, which no known model uses")
        else:
            self._refuse(f"{what} is an array of the unknown value type {element}")
        return _Array(element, count, position, end), end

    def _past_strings(self, position: int, count: int, what: str) -> int:
        # The hot loop of opening (49,152 tokens and as many merges in the demo model), so it only counts bytes.
        mapped, last = self._map, self._size - 8
        length_at: Callable[[mmap.mmap, int], tuple[int]] = struct.Struct("<Q").unpack_from
        for number in range(count):
            if position > last:
                self._need(position, 8, f"{what}, string {number}")
            position += 8 + length_at(mapped, position)[0]
        if position > self._size:
            self._refuse(f"ends inside {what}: its strings would end at byte {position:,} of {self._size:,}")
        return position

    def _parse_tensor(self, position: int, number: int, entries: list[tuple[str, tuple[int, ...], int, int]]) -> int:
        text, position = self._string_at(position, f"the name of tensor {number}")
        if text.length > _LONGEST_KEY:
            self._refuse(f"the name of tensor {number} is {text.length:,} bytes long; {_LONGEST_KEY:,} are allowed")
        name = self._decoded(text, f"the name of tensor {number}")
        what = f"the entry of tensor {shown(name)}"
        self._need(position, 4, what)
        rank: int = struct.unpack_from("<I", self._map, position)[0]
        if rank > _MOST_DIMENSIONS:
            self._refuse(f"tensor {shown(name)} has {rank:,} dimensions; ggml knows at most {_MOST_DIMENSIONS}")
        self._need(position + 4, 8 * rank + 12, what)
        *sizes, kind, offset = struct.unpack_from(f"<{rank}QIQ", self._map, position + 4)
        entries.append((name, tuple(reversed(sizes)), kind, offset))
        return position + 16 + 8 * rank

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]], position: int) -> None:
        """Check every tensor's extent; all that is wrong with the tensors is one error."""
        alignment = 32
        if "general.alignment" in self:
            alignment = self.integer("general.alignment") or 0
            if alignment < 8 or alignment & (alignment - 1):
                self._refuse(f"general.alignment is {alignment}; expected a power of two, at least 8")
        data_start = -(-position // alignment) * alignment
        problems: list[Problem] = []
        for name, shape, kind_id, offset in entries:
            tensor = self._placed(name, shape, kind_id, data_start + offset)
            if offset % alignment:
                tensor = f"starts at offset {offset:,}, which is not a multiple of the file's alignment, {alignment}"
            elif name in self.tensors:
                tensor = "occurs twice"
            if isinstance(tensor, str):
                problems.append(Problem(f"{self.path}, tensor {shown(name)}", tensor, _COPY_AGAIN))
            else:
                self.tensors[name] = tensor
        end, before = data_start, ""
        for tensor in sorted(self.tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
            if tensor.start < end and tensor.nbytes:
                says = f"overlaps tensor {shown(before)}"
                problems.append(Problem(f"{self.path}, tensor {shown(tensor.name)}", says, _COPY_AGAIN))
            end, before = max(end, tensor.start + tensor.nbytes), tensor.name
        if problems:
            raise CheckpointError(f"GGUF file {str(self.path)!r}", first_of(problems))

    def _placed(self, name: str, shape: tuple[int, ...], kind_id: int, start: int) -> GgufTensor | str:
        kind = TYPES.get(kind_id)
        if kind is None:
            return f"has the unknown type {kind_id}"
        elements = 1
        for size in shape:
            elements *= size or 1
            if elements >= 2**63:  # torch counts in 64 bits
                return f"has shape {list(shape)}, of 2**63 or more elements"
        row = shape[-1] if shape else 1
        if row % kind.block:
            return f"has rows of {row:,} values, not a whole number of {kind.name}'s blocks of {kind.block}"
        nbytes = 0 if 0 in shape else elements // kind.block * kind.nbytes
        if start + nbytes > self._size:
            return f"of shape {list(shape)} would end at byte {start + nbytes:,}; the file has {self._size:,}"
        return GgufTensor(name, kind, shape, start, nbytes)

    def _unexpected(self, key: str, expected: str) -> NoReturn:
        self._refuse(
            f"the metadata under {shown(key)} is not {expected}", "convert the model again with a current tool"
        )

    def _refuse(self, says: str, fix: str = _COPY_AGAIN) -> NoReturn:
        raise CheckpointError(f"GGUF file {str(self.path)!r}", Problem("", says, fix))


def _decimal(value: float) -> float:
    """The shortest decimal number that is `value` in float32: the 1e-05 that was meant, not 9.999999747378752e-06."""
    for digits in range(6, 9):
        near = float(f"{value:.{digits}g}")
        if array("f", (near,))[0] == value:
            return near
    return value
