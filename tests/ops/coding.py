"""Floats as coded rows, by plain rounding: every format that takes coded rows has its coding here."""

from __future__ import annotations

import torch

from specengine.ops.coded.rows import NUMBERS, CodedRows, Coding

CODED = {
    "int4_32": Coding("int4", 32, zeros=True),
    "int4_128": Coding("int4", 128, zeros=True),
    "int8_32": Coding("int8", 32, zeros=True),
    "int8_128": Coding("int8", 128, zeros=True),
    "int4_min16": Coding("int4", 16, minima=True),
    "table4_16": Coding("e2m1", 16),
    "table4_32": Coding("iq4", 32),
    "e4m3": Coding("e4m3", 128),
}


def coded(rows: torch.Tensor, coding: Coding) -> CodedRows:
    """Codes rows [N, C]; groups without a value other than 0 have scale 0."""
    count, columns = rows.shape
    if count == 0:
        return coded(torch.zeros(1, columns), coding).rows(0, 0)
    padded = torch.nn.functional.pad(rows.float(), (0, -columns % coding.group))
    groups = padded.view(count, -1, coding.group)
    low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
    numbers = NUMBERS[coding.kind].nan_to_num(0.0)
    scales = (high - low) / 15 if coding.kind == "int4" else (high - low) / 255
    if coding.kind not in ("int4", "int8"):
        scales = torch.maximum(high, -low) / numbers.abs().max()
    if coding.minima:
        scales, low = scales.half().float(), low.half().float()  # as the format keeps them
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    zeros = (-low * inverse).round()
    if coding.minima:
        wanted = (groups - low[..., None]) * inverse[..., None]
    else:
        wanted = groups * inverse[..., None] + (zeros[..., None] if coding.zeros else 0.0)
    order = numbers.argsort()
    order = order[NUMBERS[coding.kind][order].isfinite()]
    place = torch.bucketize(wanted, (numbers[order][1:] + numbers[order][:-1]) / 2)
    codes = order[place].to(torch.uint8).view(count, -1)[:, :columns].contiguous()
    return CodedRows(
        coding,
        codes,
        scales,
        zeros.to(torch.uint8) if coding.zeros else None,
        low if coding.minima else None,
    )
