"""Packed weights in the cache folder: what packing computes from a model's files is read back at the next start.

A file of the folder is named for its key: the model's files with a digest of their ends, the dtype, and the code that
packs. It has a header in JSON with its SHA-256, then the weights, each with a checksum. All are checked before a weight
is used. A file that is damaged or has another key counts as missing.

The file is mapped, so that a start waits for no copy. A thread then moves the weights into large pages, where a pass
reads them a tenth faster.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from threading import Thread, main_thread
from typing import Any

import torch

from specengine import _C
from specengine.utils.atomic_file import atomic_file
from specengine.utils.build_info import __version__
from specengine.utils.cache_dir import cache_dir
from specengine.utils.large_pages import ALIGNMENT
from specengine.utils.measurement_cache import file_stamps
from specengine.utils.model_files import model_files

LEAST_BYTES = 32 << 20  # of a model's kept weights: fewer are packed as fast as they are read
MOST_BYTES = 8 << 30  # of all files: those that were used least recently go
# Of a file that is missing, damaged or another program's.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, RuntimeError, MemoryError)
_KINDS = ("uint8", "int8", "bool", "uint16", "int32", "int64", "float16", "bfloat16", "float32")
DTYPES = {kind: getattr(torch, kind) for kind in _KINDS}
_ROOMS = ("models", "ops", "drafters/suffix")  # whose modules compute what is kept
_MAGIC = b"specengine packed weights 2\n"
_HEAD = struct.Struct(f"<{len(_MAGIC)}sQ32s")  # magic, bytes of the header, its SHA-256
_MOST_HEADER = 16 << 20
_END_BYTES = 64 << 10  # at either end of a model's file
_LEFTOVER_SECONDS = 3600  # a temporary file of this age belongs to a process that was killed


class KeptWeights:
    """The packed weights of one model in the cache folder, uint8 tensors by name.

    Faults of the folder cost the time to pack, nothing else.
    """

    def __init__(self, path: Path | None = None, key: Any = None) -> None:
        self._path, self._key = path, key
        self._found: dict[str, torch.Tensor] = {}
        self._used: dict[str, torch.Tensor] = {}
        self._mapped: _C.MappedFile | None = None
        self._is_new = False
        if path is not None:
            with suppress(*UNREADABLE):
                self._found, self._mapped = read_file(path, key)

    @classmethod
    def of_model(cls, source: str, dtype: str, drafts: bool) -> KeptWeights:
        """Opens those of a model's file or folder. None are kept of another source, or without a cache folder."""
        with suppress(OSError, RuntimeError):  # RuntimeError: no home folder
            folder, files = cache_dir(), file_stamps(Path(source))
            if folder is not None and files:
                key = {
                    "files": files,
                    "ends": _ends(Path(source)),
                    "dtype": dtype,
                    "drafts": drafts,
                    "code": code_that_packs(),
                }
                name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
                return cls(folder / "weights" / name, key)
        return cls()

    def get(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Returns a kept weight of the shape of `like`, or None."""
        found = self._found.get(name)
        if found is None or found.shape != like.shape:
            return None
        self._used[name] = found
        return found

    def put(self, name: str, data: torch.Tensor) -> None:
        """Takes a weight that had to be packed. It must not change any more."""
        if self._path is not None:
            self._used[name], self._is_new = data, True

    def finish(self) -> Thread | None:
        """Starts a thread that writes all weights if one had to be packed, else moves those in use into large pages."""
        weights, mapped, self._found, self._used, self._mapped = self._used, self._mapped, {}, {}, None
        size = sum(each.nbytes for each in weights.values())
        if self._is_new and LEAST_BYTES <= size <= MOST_BYTES:
            thread = Thread(target=write_file, args=(self._path, self._key, weights), name="specengine-kept-weights")
        elif mapped is not None and weights:
            thread = Thread(target=_use_large_pages, args=(mapped,), name="specengine-large-pages")
        else:
            return None
        with suppress(RuntimeError):  # no thread can be started
            thread.start()
            return thread
        return None


def read_file(path: Path, key: Any) -> tuple[dict[str, torch.Tensor], _C.MappedFile]:
    """Maps a file, and notes that it was used. Raises one of UNREADABLE for one that is missing or damaged."""
    with path.open("rb") as file:
        magic, size, digest = _HEAD.unpack(file.read(_HEAD.size).ljust(_HEAD.size, b"\0"))
        start = _padded(_HEAD.size + size)
        left = os.fstat(file.fileno()).st_size - start
        if magic != _MAGIC or size > _MOST_HEADER or left < 0:
            raise ValueError(f"{path}: not a file of packed weights")
        header = file.read(size)
        if hashlib.sha256(header).digest() != digest:
            raise ValueError(f"{path}: the header is damaged")
        content = json.loads(header)
        entries = [(*entry, prod(entry[2]) * DTYPES[entry[1]].itemsize) for entry in content["tensors"]]
        if content["key"] != key or sum(_padded(size) for *_, size in entries) != left:
            raise ValueError(f"{path}: belongs to another model, or is truncated")
        mapped = _C.MappedFile(file.fileno(), start + left)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    tensors = {}
    for name, dtype, shape, checksum, size in entries:
        own = memory[start : start + size]
        if _C.checksum(own) != checksum:
            raise ValueError(f"{path}: '{name}' is damaged")
        tensors[name] = own.view(DTYPES[dtype]).view(shape)
        start += _padded(size)
    with suppress(OSError):  # of another user, or on a disk that cannot be written
        os.utime(path)
    return tensors, mapped


def write_file(path: Path, key: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a file, and removes those that were used least recently; a folder that cannot be written stays as is."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        size = sum(each.nbytes for each in tensors.values())
        if shutil.disk_usage(path.parent).free < 2 * size:  # the last bytes of a disk are not ours
            return
        bytes_of = {name: each.contiguous().view(-1).view(torch.uint8) for name, each in tensors.items()}
        entries = [
            [name, str(each.dtype).removeprefix("torch."), list(each.shape), _C.checksum(bytes_of[name])]
            for name, each in tensors.items()
        ]
        header = json.dumps({"key": key, "tensors": entries}).encode()
        with atomic_file(path) as part, part.open("wb") as file:
            head = _HEAD.pack(_MAGIC, len(header), hashlib.sha256(header).digest()) + header
            file.write(head.ljust(_padded(len(head)), b"\0"))
            for each in bytes_of.values():
                file.write(each.numpy().data)
                file.write(bytes(_padded(each.nbytes) - each.nbytes))
        for old in _superfluous(path.parent):
            old.unlink(missing_ok=True)


def _use_large_pages(mapped: _C.MappedFile) -> None:
    """Moves the weights of a file into large pages, piece by piece until the process ends."""
    begin = 0
    while begin < mapped.size and main_thread().is_alive():
        begin = mapped.use_large_pages(begin)


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _superfluous(folder: Path) -> Iterator[Path]:
    """Yields the least recently used files beyond MOST_BYTES in all, and temporary files of killed processes."""
    stats = [(path, path.stat()) for path in folder.iterdir()]
    total = 0
    for path, stat in sorted(stats, key=lambda each: each[1].st_mtime_ns, reverse=True):
        is_part = path.name.startswith(".")
        total += 0 if is_part else stat.st_size
        if time.time() - stat.st_mtime > _LEFTOVER_SECONDS if is_part else total > MOST_BYTES:
            yield path


def _ends(source: Path) -> str:
    """Returns a digest of the first and last bytes of a model's files, headers included."""
    digest = hashlib.sha256()
    for path in model_files(source):
        if path.is_file():
            with path.open("rb") as file:
                digest.update(file.read(_END_BYTES))
                file.seek(max(0, path.stat().st_size - _END_BYTES))
                digest.update(file.read(_END_BYTES))
    return digest.hexdigest()


@cache
def code_that_packs(root: Path = Path(__file__).parents[1], core: Path = Path(_C.__file__)) -> list[Any]:
    """Returns what names that code: the version, the core's checksum, and the sizes and times of its modules."""
    content = torch.frombuffer(bytearray(core.read_bytes()), dtype=torch.uint8)
    modules = sorted(path for room in _ROOMS for path in (root / room).rglob("*.py"))
    stats = [(str(path.relative_to(root)), path.stat()) for path in modules]
    return [__version__, _C.checksum(content), [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]]
