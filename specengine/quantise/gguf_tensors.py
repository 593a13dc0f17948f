"""The tensors of a GGUF file: which tensors of a model each of them holds, their types, shapes and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from specengine.models.gguf_names import gguf_name, stored_rows
from specengine.quantise.source import Source, is_gate, is_linear

_SCALE_BYTES = {GGMLQuantizationType.Q8_0: 2, GGMLQuantizationType.Q4_1: 4}  # float16 numbers that a block begins with


@dataclass(frozen=True)
class GgufTensor:
    """A tensor to write. parts: names of its matrices, one for each expert; of any other tensor, its own name.

    shape: outermost dimension first, in values.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    kind: GGMLQuantizationType

    @property
    def dtype(self) -> np.dtype:
        """Type of the stored numbers: floats, or the bytes of blocks."""
        return _dtype(self.kind)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return _stored_shape(self.shape, self.kind)

    @property
    def nbytes(self) -> int:
        return prod(self.stored_shape) * self.dtype.itemsize


class StreamedTensor:
    """The bytes of a tensor for `GGUFWriter.write_tensor_data`, one part at a time in memory."""

    def __init__(self, source: Source, tensor: GgufTensor) -> None:
        self.nbytes = tensor.nbytes
        self._parts = (_stored(source, part, tensor.kind) for part in tensor.parts)

    def tofile(self, file: BinaryIO) -> None:
        """Writes the parts."""
        for part in self._parts:
            file.write(part.data)


def gguf_tensors(source: Source, to: str) -> list[GgufTensor]:
    """Lists the tensors of the file that holds a source, one for each part of all experts of a layer.

    to: q4_1 or q8_0. Raises ValueError for columns that fill no blocks.
    """
    parts: dict[str, list[str]] = {}
    for name in source.shapes:
        parts.setdefault(gguf_name(name, source.checkpoint.config), []).append(name)
    return [_tensor(source, stored, tuple(names), to) for stored, names in parts.items()]


def _tensor(source: Source, stored: str, parts: tuple[str, ...], to: str) -> GgufTensor:
    shape = source.shapes[parts[0]]
    kind = _kind(source, parts[0], to)
    if "_exps." in stored:
        shape = (len(parts), *shape)
    elif "_inp_shexp." in stored:  # the gate of a shared expert is a vector in these files
        shape = shape[1:]
    elif len(shape) == 3:  # a convolution has one filter per channel
        shape = (shape[0], shape[2])
    return GgufTensor(stored, parts, shape, kind)


def _kind(source: Source, name: str, to: str) -> GGMLQuantizationType:
    shape = source.shapes[name]
    if len(shape) != 2 or is_gate(name):
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[to.upper()] if is_linear(name) else GGMLQuantizationType.Q8_0
    size = GGML_QUANT_SIZES[kind][0]
    if shape[1] % size:
        where = f"{source.checkpoint.source}: tensor '{name}'"
        raise ValueError(f"{where} has {shape[1]} columns; {kind.name} needs a multiple of {size}")
    return kind


def _dtype(kind: GGMLQuantizationType) -> np.dtype:
    return np.dtype(np.float32 if kind == GGMLQuantizationType.F32 else np.uint8)


def _stored_shape(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[int, ...]:
    size, block_bytes = GGML_QUANT_SIZES[kind]
    return (*shape[:-1], shape[-1] // size * (block_bytes // _dtype(kind).itemsize))


def _stored(source: Source, name: str, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantises one tensor, its rows in the order of the file.

    Raises ValueError for scales that float16 does not hold.
    """
    stored = np.empty(_stored_shape(source.shapes[name], kind), _dtype(kind))
    for start, rows in source.steps(name):
        places = stored_rows(source.checkpoint.config, name, start, start + len(rows))
        with np.errstate(over="ignore"):  # of scales, which are looked at below
            stored[places] = quants.quantize(rows.numpy(), kind)
    if kind in _SCALE_BYTES:
        blocks = stored.reshape(-1, GGML_QUANT_SIZES[kind][1])
        scales = np.ascontiguousarray(blocks[:, : _SCALE_BYTES[kind]]).view(np.float16)
        if not np.isfinite(scales).all():
            where = f"{source.checkpoint.source}: tensor '{name}'"
            raise ValueError(f"{where} has values too large for the float16 scales of {kind.name}")
    return stored
