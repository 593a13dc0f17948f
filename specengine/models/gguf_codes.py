"""Blocks of GGUF files as coded rows: the types whose codes and scales the kernels take as they are.

The layouts are those of ggml's block_* structs. A K-quant or IQ4_XS block has 256 weights, IQ4_NL and MXFP4 have 32,
NVFP4 has 64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specengine.models.gguf_types import BlockType
from specengine.ops.coded.rows import CodedRows, Coding

CODINGS = {
    "IQ4_NL": Coding("iq4", 32),
    "IQ4_XS": Coding("iq4", 32),
    "MXFP4": Coding("e2m1", 32),
    "NVFP4": Coding("e2m1", 16),
    "Q3_K": Coding("int4", 16, zeros=True),
    "Q2_K": Coding("int4", 16, minima=True),
}

# codes uint8 [B, weights], scales float32 [B, groups], minima float32 [B, groups] or None
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def code_rows(kind: str, data: np.ndarray, factor: float = 1.0) -> CodedRows:
    """Splits stored rows into codes and scales.

    kind: one of CODINGS.  data: uint8 [R, row_bytes].  factor: multiplies all scales.
    Raises ValueError for a scale that is not a number.
    """
    coding, rows = CODINGS[kind], len(data)
    blocks = np.ascontiguousarray(data).reshape(-1, BlockType[kind].nbytes)
    codes, scales, minima = _SPLITS[kind](blocks)
    if factor != 1.0:
        scales = scales * np.float32(factor)

    def of_rows(parts: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(parts).reshape(rows, -1))

    scales_of_rows = of_rows(scales)
    zeros = torch.full(scales_of_rows.shape, 4, dtype=torch.uint8) if coding.zeros else None
    return CodedRows(coding, of_rows(codes), scales_of_rows, zeros, None if minima is None else of_rows(minima))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Splits [..., n] bytes into [..., 2 n] codes; the low nibbles are the first half."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _pairs_of_bits(packed: np.ndarray) -> np.ndarray:
    """Splits the 64 bytes of a K-quant into 256 codes: per 32 bytes, the lowest two bits of each byte come first."""
    parts = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return parts.reshape(-1, 256)


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Reads the half-float at byte `start` of each block, float32 [B, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _iq4_nl(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0), None


def _iq4_xs(blocks: np.ndarray) -> _Parts:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    steps = (low | high << 4).astype(np.float32) - 32
    return _nibbles(blocks[:, 8:].reshape(-1, 8, 16)), _halves(blocks, 0) * steps, None


def _mxfp4(blocks: np.ndarray) -> _Parts:
    exponents = blocks[:, :1].astype(np.int32)
    if (exponents == 255).any():
        raise ValueError("a block of MXFP4 has the exponent 255, which stands for no number")
    return _nibbles(blocks[:, 1:]), np.ldexp(np.float32(1), exponents - 127), None


def _nvfp4(blocks: np.ndarray) -> _Parts:
    exponents, fractions = blocks[:, :4] >> 3 & 15, (blocks[:, :4] & 7).astype(np.float32)
    normal = np.ldexp(8 + fractions, exponents.astype(np.int32) - 10)
    scales = np.where(exponents == 0, fractions / 512, normal)
    # ggml takes 0x7F, e4m3's "not a number", for zero
    scales = np.where(blocks[:, :4] == 0x7F, np.float32(0), scales)
    return _nibbles(blocks[:, 4:].reshape(-1, 4, 8)), scales, None


def _q3_k(blocks: np.ndarray) -> _Parts:
    low, packed = _pairs_of_bits(blocks[:, 32:96]), blocks[:, 96:108]
    high = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    # bytes 0 to 7 hold the low nibbles of 16 scales, bytes 8 to 11 their upper two bits
    upper = (packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    steps = (_nibbles(packed[:, :8]) | upper << 4).astype(np.float32) - 32
    return low | high << 2, _halves(blocks, 108) * steps, None


def _q2_k(blocks: np.ndarray) -> _Parts:
    steps = blocks[:, :16]
    scales = _halves(blocks, 80) * (steps & 15).astype(np.float32)
    minima = _halves(blocks, 82) * (steps >> 4).astype(np.float32)
    return _pairs_of_bits(blocks[:, 16:80]), scales, -minima


_SPLITS: dict[str, Callable[[np.ndarray], _Parts]] = {
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q3_K": _q3_k,
    "Q2_K": _q2_k,
}
