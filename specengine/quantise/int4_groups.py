"""Signed 4-bit codes with a scale per group of columns, packed as compressed-tensors' `pack-quantized`."""

from __future__ import annotations

import torch

GROUPS = (128, 64, 32)
# The largest number of a group becomes this code before rounding. Above 7.5 it is clipped, and the others get finer.
_PEAKS = tuple(6.5 + 0.5 * step for step in range(10))
_PART = 1 << 16  # weights that are quantised at once: the candidates of a part fit the cache


def group_of(columns: int) -> int | None:
    """Returns the largest group size that divides the columns, or None."""
    return next((group for group in GROUPS if columns % group == 0), None)


def quantise_rows(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rows [R, K], K a multiple of `group`. A value is (code - 8) * scale.

    Per group, the scale is the one of a few candidates that leaves the least sum of squared errors.
    Returns words int32 [R, K / 8], whose lowest four bits are the first code, and scales bfloat16 [R, K / group].
    """
    parts = [_quantise(part, group) for part in rows.float().split(max(1, _PART // rows.shape[1]))]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return pack(codes), scales


def _quantise(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = rows.view(len(rows), -1, group)
    largest = values.abs().amax(2, keepdim=True)
    best, scales = torch.full_like(largest, torch.inf), torch.ones_like(largest)
    for peak in _PEAKS:
        scale = (largest / peak).bfloat16().float()
        scale[scale == 0] = 1.0
        error = _codes(values, scale).mul_(scale).sub_(values).square_().sum(2, keepdim=True)
        scales = torch.where(error < best, scale, scales)
        best = torch.minimum(error, best)
    return _codes(values, scales).view(rows.shape), scales.view(len(rows), -1).bfloat16()


def _codes(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (values / scales).round_().clamp_(-8, 7)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Packs whole numbers from -8 to 7, [R, K], into int32 [R, K / 8]."""
    nibbles = (codes.to(torch.int32) + 8).view(len(codes), -1, 8)
    words = torch.zeros(nibbles.shape[:2], dtype=torch.int32)
    for place in range(8):
        words |= nibbles[..., place] << 4 * place
    return words
