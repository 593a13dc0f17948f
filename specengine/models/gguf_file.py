"""GGUF files, whole or split: metadata as plain Python values and a table of tensors; nothing is mapped.

The reader of the gguf package is not used: it makes a numpy array of every token and merge of the vocabulary. That
costs seconds, and more memory than a small model.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from math import prod
from os import SEEK_CUR
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specengine import _C
from specengine.models.gguf_types import ARRAY, DEFAULT_ALIGNMENT, SCALARS, STRING, BlockType
from specengine.utils.model_files import gguf_parts

_MOST_DIMS = 4  # of the format
_CHUNK = 1 << 20  # bytes of strings read at once
_MOST_ITEMS = 1 << 23  # a byte of the file may become a Python object; known vocabularies have two million items


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor: shape (outermost dimension first), block type, file, and the offset of its bytes there."""

    shape: tuple[int, ...]
    type: BlockType
    path: Path
    offset: int
    row_bytes: int  # of one row; of one element where the tensor is a vector


class GGUFFile:
    """The header of a GGUF file, or of all parts of a split model: `metadata`, that of the first part, and `tensors`.

    path: of the file, or of any part; the others are found by the names that llama.cpp gives them.
    Raises FileNotFoundError for a missing file or part, and ValueError, naming the key or tensor, for a damaged one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        part = _Part(self.path)
        self.metadata, self.tensors = part.metadata, part.tensors
        if part.count > 1:
            self._read_parts(part)

    def _read_parts(self, given: _Part) -> None:
        paths = gguf_parts(self.path)
        if len(paths) != given.count:
            raise ValueError(
                f"{self.path}: is one of {given.count} parts (split.count), expected a name that ends in "
                f"-00001-of-{given.count:05}.gguf, or another number, by which the other parts are found"
            )
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            names = ", ".join(missing[:8])
            raise FileNotFoundError(f"{self.path}: {len(missing)} of {given.count} parts are missing: {names}")
        parts = [given if path == self.path else _Part(path) for path in paths]
        self.metadata, self.tensors = parts[0].metadata, {}
        for number, part in enumerate(parts):
            if (part.number, part.count) != (number, given.count):
                problem = f"split.no and split.count are {part.number} and {part.count}"
                raise ValueError(f"{part.path}: {problem}, expected {number} and {given.count}")
            if twice := part.tensors.keys() & self.tensors.keys():
                raise ValueError(f"{part.path}: tensor '{min(twice)}' is in another part too")
            self.tensors |= part.tensors
        wanted = self.metadata.get("split.tensors.count", len(self.tensors))
        if wanted != len(self.tensors):
            raise ValueError(f"{self.path}: the parts have {len(self.tensors)} tensors, expected {wanted}")

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Reads the stored bytes of rows [start, stop) of a tensor, uint8 [stop - start, row_bytes].

        The matrices of a tensor of three dimensions lie one after the other.
        """
        tensor = self.tensors[name]
        count = (stop - start) * tensor.row_bytes
        offset = tensor.offset + start * tensor.row_bytes
        return np.fromfile(tensor.path, np.uint8, count, offset=offset).reshape(stop - start, tensor.row_bytes)


class _Part:
    """The header of one file. number, count: which part it is of how many; a whole model is 0 of 1."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        self._size = path.stat().st_size
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path}: not a GGUF file")
            header = _Header(file, self._size, str(path))
            version = header.scalar("<u4", "version")
            if version not in (2, 3):
                raise ValueError(f"{path}: GGUF version {version} is not supported; expected little-endian 2 or 3")
            tensor_count, key_count = header.scalar("<u8", "tensor count"), header.scalar("<u8", "key count")
            for _ in range(key_count):
                key = header.string("metadata key")
                if key in self.metadata:
                    raise ValueError(f"{path}: metadata key '{key}' occurs twice")
                self.metadata[key] = header.value(header.scalar("<u4", key), key)
            entries = [header.tensor_entry() for _ in range(tensor_count)]
            alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
                raise ValueError(f"{path}: general.alignment must be a power of two, got {alignment!r}")
            base = -(-file.tell() // alignment) * alignment
        for name, dims, type_id, offset in entries:
            if name in self.tensors:
                raise ValueError(f"{path}: tensor '{name}' occurs twice")
            self.tensors[name] = self._tensor(name, tuple(reversed(dims)), type_id, base + offset)

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
        try:
            type_ = BlockType(type_id)
        except ValueError:
            raise ValueError(f"{self.path}: tensor '{name}' has unknown type number {type_id}") from None
        block, block_bytes = type_.columns, type_.nbytes
        if not shape or prod(shape) == 0 or shape[-1] % block:
            raise ValueError(f"{self.path}: tensor '{name}' of type {type_.name} has an invalid shape {shape}")
        end = offset + prod(shape) // block * block_bytes
        if end > self._size:
            raise ValueError(f"{self.path}: truncated: tensor '{name}' ends at byte {end} of {self._size}")
        row = shape[-1] if len(shape) > 1 else block
        return GGUFTensor(shape, type_, self.path, offset, row // block * block_bytes)

    @property
    def number(self) -> int:
        return self._split("split.no", 0)

    @property
    def count(self) -> int:
        return max(self._split("split.count", 1), 1)

    def _split(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if type(value) is not int:
            raise ValueError(f"{self.path}: {key} must be an integer, got {value!r}")
        return value


class _Header:
    """Reads the header in file order; every length is checked against the file before memory is allocated."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self.file = file
        self.left = size - file.tell()
        self.where = where
        self.items = 0  # of all arrays

    def take(self, count: int, what: str) -> bytes:
        self.left -= count
        if self.left < 0:
            raise ValueError(f"{self.where}: the header is truncated or damaged at '{what}'")
        return self.file.read(count)

    def scalar(self, dtype: str, what: str) -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize, what), dtype)[0].item()

    def string(self, what: str) -> str:
        (length,) = struct.unpack("<Q", self.take(8, what))
        try:
            # interned: tensor names and tokens repeat across the tables made from them
            return sys.intern(self.take(length, what).decode("utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"{self.where}: '{what}' holds text that is not UTF-8") from None

    def strings(self, count: int, key: str) -> list[str]:
        """Reads the strings of an array, many at once."""
        strings: list[str] = []
        while len(strings) < count:
            data = self.file.read(min(self.left, _CHUNK))
            found, used = _C.read_strings(data, count - len(strings))
            self.file.seek(used - len(data), SEEK_CUR)
            self.left -= used
            strings += found or [self.string(key)]  # one longer than a chunk, or damaged
        return strings

    def value(self, type_id: int, key: str) -> Any:
        if type_id == STRING:
            return self.string(key)
        if type_id == ARRAY:
            item_type, count = self.scalar("<u4", key), self.scalar("<u8", key)
            self.items += count
            if self.items > _MOST_ITEMS:
                raise ValueError(f"{self.where}: '{key}' brings the header to more than {_MOST_ITEMS} items of arrays")
            if item_type == STRING:
                return self.strings(count, key)
            dtype = np.dtype(self.scalar_type(item_type, key))
            return np.frombuffer(self.take(count * dtype.itemsize, key), dtype).tolist()
        return self.scalar(self.scalar_type(type_id, key), key)

    def scalar_type(self, type_id: int, key: str) -> str:
        if type_id not in SCALARS:
            raise ValueError(f"{self.where}: metadata key '{key}' has unknown type number {type_id}")
        return SCALARS[type_id]

    def tensor_entry(self) -> tuple[str, list[int], int, int]:
        """Reads name, dimensions (innermost first), type number, and offset from the start of the data."""
        name = self.string("tensor name")
        count = self.scalar("<u4", name)
        if count > _MOST_DIMS:
            raise ValueError(f"{self.where}: tensor '{name}' has {count} dimensions, expected at most {_MOST_DIMS}")
        dims = [self.scalar("<u8", name) for _ in range(count)]
        return name, dims, self.scalar("<u4", name), self.scalar("<u8", name)
