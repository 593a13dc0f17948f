"""Writes safetensors files whose tensors come one at a time, in shards with an index."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int64: "I64",
    torch.int32: "I32",
}
SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor to write."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path, entries: Sequence[Entry], tensors: Iterable[Iterable[torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Writes `tensors` to model.safetensors, or to shards and an index.

    tensors: for each entry, in their order, its rows in parts. A part is freed when it is written. A shard holds at
    most `shard_bytes`, or one tensor.
    """
    shards = _split(entries, shard_bytes)
    weight_map: dict[str, str] = {}
    values = iter(tensors)
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= {entry.name: name for entry in shard}
        with (folder / name).open("wb") as file:
            places = _write_header(file, shard)
            for entry in shard:
                file.seek(places[entry.name])
                for part in next(values):
                    assert part.dtype == entry.dtype, entry.name
                    file.write(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                assert file.tell() == places[entry.name] + entry.nbytes, entry.name
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(entry.nbytes for entry in entries)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _split(entries: Sequence[Entry], shard_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _write_header(file: BinaryIO, shard: Sequence[Entry]) -> dict[str, int]:
    """Writes the header of one file. Returns the place of each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for entry in sorted(shard, key=lambda entry: -entry.dtype.itemsize):  # so each begins at a multiple of its size
        offsets[entry.name] = end
        end += entry.nbytes
        place = [offsets[entry.name], end]
        header[entry.name] = {"dtype": _DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    return {name: 8 + len(text) + offset for name, offset in offsets.items()}
