"""Safetensors files with the types and the reads that quantised weights need."""

from __future__ import annotations

import torch
from safetensors import safe_open

from specengine.models.checkpoint_hf import SAFETENSORS_DTYPES, SafetensorsCheckpoint

# e8m0 scales come as their bytes, exponents with a bias of 127: uint8 is how other files store them
_DTYPES = {
    **SAFETENSORS_DTYPES,
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


class QuantisedFiles(SafetensorsCheckpoint):
    """model.safetensors, or the shards that its index names, with 8-bit types, columns and scalars."""

    dtypes = _DTYPES

    def read_columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Reads columns [start, stop) of a matrix as a new contiguous tensor."""
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_slice(name)[:, start:stop].contiguous()

    def read_whole(self, name: str) -> torch.Tensor:
        """Reads a tensor that may be a scalar."""
        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name).clone()
