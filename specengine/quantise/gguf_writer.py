"""Writes GGUF files of Q4_1 or Q8_0 blocks; embedding and head are Q8_0 in both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

from specengine.models.gguf_names import gguf_name, stored_rows
from specengine.quantise.gguf_header import architecture_of, model_metadata
from specengine.quantise.rope_divisors import divisors_of
from specengine.quantise.source import Source, is_linear
from specengine.utils.atomic_file import atomic_file

_SCALE_BYTES = {GGMLQuantizationType.Q8_0: 2, GGMLQuantizationType.Q4_1: 4}  # float16 numbers that a block begins with
_FILE_TYPES = {"q4_1": LlamaFileType.MOSTLY_Q4_1, "q8_0": LlamaFileType.MOSTLY_Q8_0}


def write_gguf(source: Source, to: str, out: Path) -> None:
    """Writes a source to file `out`; to: q4_1 or q8_0.

    Embedding and head keep 8 bits in either: every token passes through both, and the engine reads int4 models so.
    Raises ValueError for columns that fill no blocks, and for a model or tokenizer that a GGUF file cannot describe.
    """
    checkpoint = source.checkpoint
    types = {name: _type(source, name, to) for name in source.shapes}
    metadata = model_metadata(source)
    divisors = np.array(divisors_of(checkpoint.config.rope, checkpoint.config.head_dim), np.float32)
    with atomic_file(out) as part:
        writer = GGUFWriter(part, architecture_of(checkpoint.config))
        try:
            writer.add_file_type(_FILE_TYPES[to])
            writer.add_quantization_version(2)  # of ggml's blocks; a reader of llama.cpp asks for it
            for key, value in metadata.items():
                _add(writer, key, value)
            if divisors.size:
                writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
            for name, kind in types.items():
                shape, dtype = _stored_shape(source.shapes[name], kind)
                nbytes = int(np.prod(shape)) * dtype.itemsize
                writer.add_tensor_info(gguf_name(name), shape, dtype, nbytes, kind if dtype == np.uint8 else None)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if divisors.size:
                writer.write_tensor_data(divisors)
            for name in source.tensors():
                writer.write_tensor_data(_blocks(source, name, types[name]))
        finally:
            writer.close()


def _type(source: Source, name: str, to: str) -> GGMLQuantizationType:
    shape = source.shapes[name]
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    kind = GGMLQuantizationType[to.upper()] if is_linear(name) else GGMLQuantizationType.Q8_0
    size = GGML_QUANT_SIZES[kind][0]
    if shape[1] % size:
        where = f"{source.checkpoint.source}: tensor '{name}'"
        raise ValueError(f"{where} has {shape[1]} columns; {kind.name} needs a multiple of {size}")
    return kind


def _stored_shape(shape: tuple[int, ...], kind: GGMLQuantizationType) -> tuple[tuple[int, ...], np.dtype]:
    if kind == GGMLQuantizationType.F32:
        return shape, np.dtype(np.float32)
    size, block_bytes = GGML_QUANT_SIZES[kind]
    return (shape[0], shape[1] // size * block_bytes), np.dtype(np.uint8)


def _blocks(source: Source, name: str, kind: GGMLQuantizationType) -> np.ndarray:
    """Quantises one tensor, its rows in the order of the file.

    Raises ValueError for scales that float16 does not hold.
    """
    shape, dtype = _stored_shape(source.shapes[name], kind)
    stored = np.empty(shape, dtype)
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


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
