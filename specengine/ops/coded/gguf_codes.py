"""The blocks of GGUF files as coded rows, for packers that take these."""

from __future__ import annotations

import torch

from specengine.ops.coded.rows import CodedRows, Coding

_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q4_K": 144}  # of a block


def coded_blocks(rows: torch.Tensor, kind: str) -> CodedRows:
    """Returns rows of a file, uint8 [R, row_bytes], with their codes and scales in groups of 32.

    Scales and minima are float16 numbers; the products of Q4_K's two scales are rounded to these, as on the CPU.
    Source: ggml's `block_q8_0`, `block_q4_0`, `block_q4_1`, `block_q4_K`. Raises ValueError for another type.
    """
    if kind not in _BYTES:
        raise ValueError(f"type: expected {', '.join(_BYTES)}, got {kind!r}")
    blocks = rows.unflatten(1, (-1, _BYTES[kind]))
    if kind == "Q8_0":
        codes, scales = blocks[..., 2:] ^ 128, _halves(blocks[..., :2])  # int8 plus 128
        return _with_middle("int8", codes, scales, 128)
    if kind == "Q4_0":
        return _with_middle("int4", _nibbles(blocks[..., 2:]), _halves(blocks[..., :2]), 8)
    if kind == "Q4_1":
        scales, minima = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
        return _with_minima(_nibbles(blocks[..., 4:]), scales, minima)
    small = blocks[..., 4:16]
    first, second, third = small[..., :4], small[..., 4:8], small[..., 8:]
    steps = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    depths = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    scales = (_halves(blocks[..., :2]) * steps).half().float()
    minima = (-_halves(blocks[..., 2:4]) * depths).half().float()
    codes = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))  # two groups share 32 bytes
    return _with_minima(codes, scales, minima)


def _halves(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The low halves of all bytes, then the high ones."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _with_middle(kind: str, codes: torch.Tensor, scales: torch.Tensor, middle: int) -> CodedRows:
    scales = scales.flatten(1)
    zeros = torch.full_like(scales, middle, dtype=torch.uint8)
    return CodedRows(Coding(kind, 32, zeros=True), codes.flatten(1), scales, zeros)


def _with_minima(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor) -> CodedRows:
    return CodedRows(Coding("int4", 32, minima=True), codes.flatten(1), scales.flatten(1), minima=minima.flatten(1))
