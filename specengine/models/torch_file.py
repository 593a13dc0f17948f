"""Reads files of torch.save without torch.load: the table of tensors, and their rows; no code runs, nothing is mapped.

torch.load(weights_only=True) refuses code too. But a file that it accepts can demand any amount of memory, by a storage
of 10^12 elements, a compressed entry or strides of zero.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_LONGEST_PICKLE = 16 << 20  # bytes; ten thousand tensors take 2 MiB
_OPCODES = (  # all that torch.save writes; some of the others allocate memory by a number in the file
    *("PROTO", "STOP", "MARK", "GLOBAL", "REDUCE", "BUILD", "BINPERSID", "BINPUT", "LONG_BINPUT", "BINGET"),
    *("LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1"),
    *("BINUNICODE", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
    *("EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS"),
)


class _Storage(NamedTuple):
    kind: str  # of the storage class: "FloatStorage"
    key: str


class _Pickled(NamedTuple):
    """A tensor as its pickle describes it; numbers count elements."""

    storage: Any
    offset: Any
    shape: Any
    stride: Any
    dtype: Any


@dataclass(frozen=True)
class TorchTensor:
    """One tensor. offset: of its first element in the file, bytes.  stride: elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset: int


class TorchFile:
    """The tensors of a dict that torch.save wrote. Raises ValueError naming the file for any other content."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size
        try:
            with zipfile.ZipFile(path) as archive:
                entries = {entry.filename: entry for entry in archive.infolist()}
                index = next((name for name in entries if name.split("/")[1:] == ["data.pkl"]), None)
                if index is None or not self._plain(entries[index]) or entries[index].file_size > _LONGEST_PICKLE:
                    raise self._error("it has no plain data.pkl")
                prefix = index.removesuffix("data.pkl")
                if f"{prefix}byteorder" in entries and archive.read(f"{prefix}byteorder") != b"little":
                    raise self._error("its bytes are not in little-endian order")
                pickled = archive.read(index)
        except (zipfile.BadZipFile, OSError, EOFError, RuntimeError, UnicodeDecodeError, struct.error) as error:
            raise self._error(str(error)) from None
        listed = self._unpickled(pickled)
        storages = {name.removeprefix(f"{prefix}data/"): entry for name, entry in entries.items()}
        self.tensors = {name: self._tensor(name, entry, storages) for name, entry in listed.items()}
        # tied weights are listed twice; listing one storage more often would make a small file read as a huge model
        if sum(prod(t.shape) * _itemsize(t.dtype) for t in self.tensors.values()) > 2 * self._size:
            raise self._error("its tensors are larger than the file")

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}: not an intact PyTorch zip file: {problem}")

    def _plain(self, entry: zipfile.ZipInfo) -> bool:
        return entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size <= self._size

    def _unpickled(self, data: bytes) -> dict[str, _Pickled]:
        try:
            listed = _Unpickler(io.BytesIO(data)).load()
        except _Refused:
            raise ValueError(
                f"{self.path}: refused, it holds pickled objects other than tensors; convert it to safetensors"
            ) from None
        except Exception as error:  # a damaged pickle may call known functions with any arguments
            raise self._error(f"its pickle cannot be read: {error}") from None
        if not isinstance(listed, dict):
            raise ValueError(f"{self.path}: expected a dict of tensors, got {type(listed).__name__}")
        for name, entry in listed.items():
            if not isinstance(name, str) or not isinstance(entry, _Pickled):
                raise ValueError(f"{self.path}: entry {str(name)[:80]!r} is not a dense tensor")
        return listed

    def _tensor(self, name: str, entry: _Pickled, storages: dict[str, zipfile.ZipInfo]) -> TorchTensor:
        storage, offset = entry.storage, entry.offset
        shape, stride = entry.shape, entry.stride
        stored = storages.get(storage.key) if isinstance(storage, _Storage) else None
        if stored is None or not self._plain(stored):
            raise self._error(f"tensor '{name}' has no plain storage")
        if not (_numbers(shape) and _numbers(stride) and _numbers((offset,)) and len(shape) == len(stride) <= 8):
            raise self._error(f"tensor '{name}' has an invalid shape")
        dtype = entry.dtype or _STORAGES.get(storage.kind, storage.kind)
        span = 1 + sum((count - 1) * step for count, step in zip(shape, stride, strict=True)) if prod(shape) else 0
        if (offset + span) * _itemsize(dtype) > stored.file_size:
            raise self._error(f"tensor '{name}' ends behind its storage")
        start = self._start(stored) + offset * _itemsize(dtype)
        if start + span * _itemsize(dtype) > self._size:
            raise self._error(f"truncated, tensor '{name}' ends behind the file")
        return TorchTensor(tuple(shape), tuple(stride), dtype, start)

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """Finds the first byte of an entry: behind its local header, whose length the directory does not give."""
        with open(self.path, "rb") as file:
            file.seek(entry.header_offset)
            header = file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise self._error(f"'{entry.filename}' is not where it should be")
        return entry.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads rows [start, stop) of a tensor that has at least one dimension and a type that torch names."""
        tensor = self.tensors[name]
        dtype = getattr(torch, tensor.dtype)
        shape = (stop - start, *tensor.shape[1:])
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        span = 1 + sum((count - 1) * step for count, step in zip(shape, tensor.stride, strict=True))
        first = tensor.offset + start * tensor.stride[0] * dtype.itemsize
        data = torch.from_numpy(np.fromfile(self.path, np.uint8, span * dtype.itemsize, offset=first))
        return data.view(dtype).as_strided(shape, tensor.stride)


def _itemsize(dtype: str) -> int:
    known = getattr(torch, dtype, None)
    return known.itemsize if isinstance(known, torch.dtype) else 1  # the tensor is listed, but cannot be read


def _numbers(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(n) is int and 0 <= n < 1 << 48 for n in values)


class _Refused(Exception):
    """A pickle refers to an object that is not part of a tensor."""


class _Unpickler(pickle._Unpickler):  # in Python: the C version allocates by numbers in the file
    dispatch = {  # noqa: RUF012 - as in the base class
        code[0]: pickle._Unpickler.dispatch[code[0]] for code in (getattr(pickle, name) for name in _OPCODES)
    }

    def find_class(self, module: str, name: str) -> Any:
        if (found := _KNOWN.get((module, name))) is not None:
            return found
        if module in ("torch", "torch.storage"):
            return name  # of a storage or a type, as text: it cannot be called
        raise _Refused

    def persistent_load(self, pid: Any) -> _Storage:
        kind, storage, key, _place, _count = pid
        if kind != "storage" or not isinstance(storage, str) or not isinstance(key, str):
            raise ValueError("a persistent id names no storage")
        return _Storage(storage, key)


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> _Pickled:
    return _Pickled(storage, offset, shape, stride, "")


def _tensor_v3(storage: Any, offset: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any) -> Any:
    return _Pickled(storage, offset, shape, stride, str(dtype))


def _parameter(data: Any, *_: Any) -> Any:
    return data


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
}
