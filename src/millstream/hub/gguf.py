"""Reads the header of a GGUF file: its metadata and where its tensors lie.

    magic "GGUF" | version | num_tensors | num_metadata | metadata ... | tensor infos ... | padding | tensor data

All little endian. A file may come from anywhere, so every count, length and offset is compared with the file's size
before it is used, in Python's unbounded integers; whatever is wrong with a file ends as a ModelError.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.errors import ModelError
from millstream.hub.gguf_types import BY_NUMBER

MAX_DIMS = 4
MAX_ARRAY_DEPTH = 4
MAX_ALIGNMENT = 2**20
DEFAULT_ALIGNMENT = 32
SUPPORTED_VERSIONS = (2, 3)

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is in torch's order (rows first); quantised blocks run along the last one."""

    name: str
    type: int
    """ggml's number of the type."""
    type_name: str
    """Its name: F32, Q4_1, ..."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, in bytes."""
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's header."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)
    """By key: int, float, bool, str, or lists of them."""
    tensors: dict[str, GGUFTensor] = field(repr=False)


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of the GGUF file (version 2 or 3, little endian) at `path`.

    Raises ModelError when the file can't be opened, is not GGUF, or its header does not hold together.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4)
            if head != b"GGUF":
                raise ModelError(f"{path} is not a GGUF file: it begins with {head!r}, not with b'GGUF'")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as e:
        raise ModelError(f"{path} can't be read: {e.strerror or e}") from e


class _Reader:
    """A position in the file's bytes, and the steps that move it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._pos = 4

    def read(self) -> GGUFFile:
        version = self._u32()
        if version not in SUPPORTED_VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in SUPPORTED_VERSIONS:
                raise self._error("it is big endian; only little endian files are supported")
            raise self._error(f"its version is {version}; supported are {SUPPORTED_VERSIONS}")
        num_tensors, num_metadata = self._u64(), self._u64()
        # A tensor info takes at least 24 bytes, a metadata entry 13.
        self._check_room(num_tensors * 24 + num_metadata * 13, f"{num_tensors} tensors and {num_metadata} keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = self._string(errors="strict")
            if key in metadata:
                raise self._error(f"the key {key!r} occurs twice")
            metadata[key] = self._value(self._u32(), key)
        split = metadata.get("split.count", 0)
        if isinstance(split, int) and split > 1:
            raise ModelError(f"{self._path} is one part of a model in {split} files: merge them into one file first")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self._alignment(metadata)
        start = -(-self._pos // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, dims, kind, offset in infos:
            if name in tensors:
                raise self._error(f"the tensor {name!r} occurs twice")
            tensors[name] = self._tensor(name, dims, kind, start + offset)
        return GGUFFile(self._path, metadata, tensors)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}: it must be a power of 2 up to {MAX_ALIGNMENT}")
        return alignment

    def _tensor_info(self) -> tuple[str, list[int], int, int]:
        name = self._string(errors="strict")
        num_dims = self._u32()
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._error(f"the tensor {name!r} has {num_dims} dimensions: 1 to {MAX_DIMS} are possible")
        return name, [self._u64() for _ in range(num_dims)], self._u32(), self._u64()

    def _tensor(self, name: str, dims: list[int], kind: int, offset: int) -> GGUFTensor:
        if kind not in BY_NUMBER:
            raise self._error(f"the tensor {name!r} has the unknown type number {kind}")
        _, type_name, block_len, block_bytes = BY_NUMBER[kind]
        if 0 in dims:
            raise self._error(f"the tensor {name!r} is empty: its shape is {dims[::-1]}")
        if dims[0] % block_len:
            raise self._error(
                f"the tensor {name!r} has rows of {dims[0]} values: {type_name} needs a multiple of {block_len}"
            )
        num_bytes = dims[0] // block_len * block_bytes
        for dim in dims[1:]:
            num_bytes *= dim
        if offset + num_bytes > self._size:
            raise self._error(
                f"the tensor {name!r} ends at byte {offset + num_bytes} of a file of {self._size} (cut off?)"
            )
        return GGUFTensor(
            name=name,
            type=kind,
            type_name=type_name,
            shape=tuple(reversed(dims)),
            offset=offset,
            num_bytes=num_bytes,
        )

    def _value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1, key)[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._error(f"the key {key!r} has a value of the unknown kind {kind}")
        if depth == MAX_ARRAY_DEPTH:
            raise self._error(f"the key {key!r} has arrays more than {MAX_ARRAY_DEPTH} deep")
        item_kind, count = self._u32(), self._u64()
        if item_kind in _SCALARS:
            return self._numbers(_SCALARS[item_kind], count, key)
        if item_kind == _STRING:
            return self._strings(count, key)
        self._check_room(count * 12, f"{count} arrays in {key!r}")
        return [self._value(item_kind, key, depth + 1) for _ in range(count)]

    def _numbers(self, code: str, count: int, key: str) -> list[Any]:
        num_bytes = struct.calcsize("<" + code) * count
        self._check_room(num_bytes, f"{count} values of {key!r}")
        values = struct.unpack_from(f"<{count}{code}", self._data, self._pos)
        self._pos += num_bytes
        return list(values)

    def _strings(self, count: int, key: str) -> list[str]:
        """Many strings in one tight loop: a vocabulary with its merges is half a million of them."""
        self._check_room(count * 8, f"{count} strings of {key!r}")
        data, size, pos, unpack = self._data, self._size, self._pos, _U64.unpack_from
        strings = []
        for _ in range(count):
            if pos + 8 > size:
                raise self._error(f"the file ends within the strings of {key!r}")
            start = pos + 8
            pos = start + unpack(data, pos)[0]
            if pos > size:
                raise self._error(f"a string of {key!r} is longer than the file")
            strings.append(str(data[start:pos], "utf-8", "replace"))
        self._pos = pos
        return strings

    def _string(self, *, errors: str = "replace") -> str:
        length = self._u64()
        self._check_room(length, f"a string of {length} bytes")
        text = self._data[self._pos : self._pos + length]
        self._pos += length
        try:
            return str(text, "utf-8", errors)
        except UnicodeDecodeError:
            raise self._error(f"the name {text[:80]!r} is not UTF-8") from None

    def _u32(self) -> int:
        return self._unsigned(_U32)

    def _u64(self) -> int:
        return self._unsigned(_U64)

    def _unsigned(self, form: struct.Struct) -> int:
        self._check_room(form.size, "a number")
        value: int = form.unpack_from(self._data, self._pos)[0]
        self._pos += form.size
        return value

    def _check_room(self, num_bytes: int, what: str) -> None:
        if self._pos + num_bytes > self._size:
            raise self._error(f"{what} at byte {self._pos} can't fit in a file of {self._size} bytes (cut off?)")

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self._path} is not a sound GGUF file: {message}")
