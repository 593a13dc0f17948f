"""Writes GGUF files of Q4_1 or Q8_0 blocks; embedding and head are Q8_0 in both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

from specengine.quantise.gguf_header import architecture_of, model_metadata
from specengine.quantise.gguf_tensors import StreamedTensor, gguf_tensors
from specengine.quantise.rope_divisors import divisors_of
from specengine.quantise.source import Source
from specengine.quantise.tiled_heads import with_tiled_heads
from specengine.utils.atomic_file import atomic_file

_FILE_TYPES = {"q4_1": LlamaFileType.MOSTLY_Q4_1, "q8_0": LlamaFileType.MOSTLY_Q8_0}


def write_gguf(source: Source, to: str, out: Path) -> None:
    """Writes a source to file `out`; to: q4_1 or q8_0.

    Embedding and head keep 8 bits in either: every token passes through both, and the engine reads int4 models so.
    Raises ValueError for columns that fill no blocks, and for a model or tokenizer that a GGUF file cannot describe.
    """
    checkpoint = with_tiled_heads(source.checkpoint)
    source = replace(source, checkpoint=checkpoint)
    tensors = {tensor.name: tensor for tensor in gguf_tensors(source, to)}
    metadata = model_metadata(source, {name: tensor.shape for name, tensor in tensors.items()})
    divisors = np.array(divisors_of(checkpoint.config.rope, checkpoint.config.rotated), np.float32)
    with atomic_file(out) as part:
        writer = GGUFWriter(part, architecture_of(checkpoint.config))
        try:
            writer.add_file_type(_FILE_TYPES[to])
            writer.add_quantization_version(2)  # of ggml's blocks; a reader of llama.cpp asks for it
            for key, value in metadata.items():
                _add(writer, key, value)
            if divisors.size:
                writer.add_tensor_info("rope_freqs.weight", divisors.shape, divisors.dtype, divisors.nbytes)
            for name, tensor in tensors.items():
                raw = None if tensor.kind == GGMLQuantizationType.F32 else tensor.kind
                writer.add_tensor_info(name, tensor.stored_shape, tensor.dtype, tensor.nbytes, raw)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            if divisors.size:
                writer.write_tensor_data(divisors)
            for name in source.progressing(tensors):
                streamed = StreamedTensor(source, tensors[name])
                writer.write_tensor_data(streamed)  # type: ignore[arg-type]  # it asks for nbytes and tofile alone
        finally:
            writer.close()


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
