"""Packed weights: matrices as small whole numbers, most of them differences from other matrices, entropy-coded.

The file has bytes for every tensor `X`, deflated. A matrix is base + codes * steps. `X.steps` float16 [rows] has a step
for each row, negative where its codes are int8; in other rows a byte has two. Rows lie in the order of their steps, so
that deflate finds like codes together. The metadata's `index` says where the bases are, and what the bytes of `X` are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specengine.utils.atomic_file import atomic_file
from specengine.utils.kept_tensors import most_unpacked

FILENAME = "packed.safetensors"
_FORMAT = "specengine-packed-1"
OWN = ""  # the source of bases that the file itself has, above the matrix
_HALF = 8  # codes that share a byte are -8 .. 7
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.bfloat16, torch.float32, torch.int64, torch.bool)}


@dataclass(frozen=True)
class PackedMatrix:
    """codes: int8 [R, C].  steps: float16 [R].  base: source and name of the matrix that codes * steps are added to."""

    codes: torch.Tensor
    steps: torch.Tensor
    base: tuple[str, str] | None = None

    def values(self, base: torch.Tensor | None) -> torch.Tensor:
        """Computes the matrix, float32 [R, C]. Products and sums are two operations, so all machines round alike."""
        change = self.codes.float() * self.steps.float()[:, None]
        return change if base is None else base + change


def write_packed(path: Path, tensors: Mapping[str, torch.Tensor | PackedMatrix], sources: Mapping[str, str]) -> None:
    """Writes packed tensors, whole or not at all. sources: the bases' sources and their digests.

    Raises ValueError for an empty tensor and for steps that are not finite.
    """
    index: dict[str, Any] = {}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, PackedMatrix):
            is_whole = tensor.codes.numel() > 0 and bool(tensor.steps.isfinite().all())
        else:
            is_whole = tensor.numel() > 0
        if not is_whole:
            raise ValueError(f"tensors: {name} has no element, or weights that are not finite")
        if isinstance(tensor, PackedMatrix):
            index[name] = {"shape": list(tensor.codes.shape), "base": tensor.base}
            stored[f"{name}.steps"], codes = _rows(tensor)
            stored[name] = _deflated(codes, zlib.Z_HUFFMAN_ONLY)
        else:
            index[name] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            stored[name] = _deflated(tensor, zlib.Z_DEFAULT_STRATEGY)
    about = {"format": _FORMAT, "sources": json.dumps(dict(sources)), "index": json.dumps(index)}
    with atomic_file(path) as part:
        save_file(stored, part, about)


def unpack(
    path: Path,
    digest: Callable[[str], str],
    read: Callable[[str, str, torch.Size, torch.Tensor | None], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Reads all tensors of a packed file, matrices as float32.

    digest: of a source.  read: a base by source, name, the shape that is wanted, and the drafter's tokens if it has
    `d2t`.
    Raises ValueError for a damaged file, and where a source is not the one that the file was made from.
    """
    try:
        with safe_open(path, "pt") as file:
            about = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            sources = json.loads(about["sources"])
            for source, expected in sources.items():
                if digest(source) != expected:
                    raise ValueError(f"it was made from another {source} than the one here")
            out: dict[str, torch.Tensor] = {}
            tokens = None
            left = most_unpacked(path.stat().st_size)
            for name, info in json.loads(about["index"]).items():
                shape, dtype = torch.Size(info["shape"]), _DTYPES[info.get("dtype", "float32")]
                left -= shape.numel() * dtype.itemsize
                if left < 0 or min(shape, default=1) < 1:
                    raise ValueError(f"{name} of shape {tuple(shape)} is empty, or too large for the file")
                raw = _inflated(file.get_tensor(name), left)
                if "dtype" in info:
                    out[name] = torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
                    if name == "d2t":
                        tokens = out[name] + torch.arange(len(out[name]))
                    continue
                steps = file.get_tensor(f"{name}.steps")
                matrix = PackedMatrix(_codes(raw, shape, steps), steps.abs())
                base = None
                if info["base"]:
                    source, place = info["base"]
                    if source != OWN and source not in sources:
                        raise ValueError(f"its source {source!r} has no digest")
                    base = like(out[place], shape) if source == OWN else read(source, place, shape, tokens)
                out[name] = matrix.values(base)
            return out
    except (SafetensorError, LookupError, TypeError, AttributeError, RuntimeError, ValueError, zlib.error) as error:
        raise ValueError(f"{path}: the packed weights cannot be read: {error}") from error


def like(base: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns the last columns of a matrix, as many as `shape` has. Raises ValueError for a matrix of other sizes."""
    if base.ndim != 2 or len(base) != shape[0] or base.shape[1] < shape[1]:
        raise ValueError(f"a base of shape {tuple(base.shape)} does not fit {tuple(shape)}")
    return base[:, -shape[1] :]


def _deflated(tensor: torch.Tensor, strategy: int) -> torch.Tensor:
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, strategy)
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(bytearray(packer.compress(raw) + packer.flush()), dtype=torch.uint8)


def _inflated(stored: torch.Tensor, most: int) -> bytes:
    inflater = zlib.decompressobj()
    raw = inflater.decompress(stored.numpy().tobytes(), max(1, most))  # 0 would be no limit
    if not inflater.eof:
        raise ValueError("its bytes are cut off, or too many for their file")
    return raw


def _rows(matrix: PackedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the steps, negative for rows of a byte to a code, and the bytes of all rows, those first."""
    columns = matrix.codes.shape[1]
    paired = ((matrix.codes >= -_HALF) & (matrix.codes < _HALF)).all(1) & (columns % 2 == 0)
    steps = torch.where(paired, matrix.steps, -matrix.steps)
    order = steps.argsort(stable=True)
    wide = len(order) - int(paired.sum())
    low, high = (matrix.codes[order[wide:]].flatten() + _HALF).view(torch.uint8).view(-1, 2).unbind(1)
    return steps, torch.cat([matrix.codes[order[:wide]].flatten().view(torch.uint8), low | high << 4])


def _codes(raw: bytes, shape: torch.Size, steps: torch.Tensor) -> torch.Tensor:
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    wide = int((steps < 0).sum())
    pairs = codes[wide * shape[1] :]
    halves = torch.stack([pairs & 15, pairs >> 4], 1).flatten().view(torch.int8) - _HALF
    ranked = torch.cat([codes[: wide * shape[1]].view(torch.int8), halves]).view(shape)
    return torch.empty_like(ranked).index_copy_(0, steps.argsort(stable=True), ranked)
