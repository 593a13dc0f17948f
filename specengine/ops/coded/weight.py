"""Weights that stay in codes on CUDA: uint8 [panels of 16 rows, chunks of 128 columns, bytes].

csrc/ops/coded/form.h has the layout. The formats have the names of the CPU's, but another layout. Columns in the
order of a file (act-order) are the caller's: it packs them in the order of the groups and gathers x likewise.
"""

from __future__ import annotations

import torch

from specengine import _C
from specengine.ops.coded.gguf_codes import coded_blocks
from specengine.ops.coded.rows import NUMBERS, CodedRows, Coding
from specengine.ops.weight import FLOAT_FORMATS, Weight, empty_weight_reference, pack_linear_reference

ROWS, COLUMNS = 16, 128  # of a panel, of a chunk
_KINDS = {"int4": 4, "int8": 8, "e4m3": 8, "e2m1": 4}  # bits
_MIDDLE = {"int4": 8, "int8": 128}

# How each format is coded: kind, columns that share a scale, type of the scales, offset of the codes.
FORMS: dict[str, _C.CodedForm] = {
    "q8": _C.CodedForm("int8", 32, "float16", "middle"),
    "q4": _C.CodedForm("int4", 32, "float16", "middle"),
    "q4_min": _C.CodedForm("int4", 32, "float16", "minima"),
    "int4_min16": _C.CodedForm("int4", 16, "float32", "minima"),
    "e2m1_16": _C.CodedForm("e2m1", 16, "float32", "none"),
    "e2m1_32": _C.CodedForm("e2m1", 32, "bfloat16", "none"),
    "e4m3": _C.CodedForm("e4m3", 128, "float32", "none"),
    **{f"{k}_{group}": _C.CodedForm(k, group, "float32", "zeros") for k in ("int4", "int8") for group in (32, 64, 128)},
    **{
        f"{kind}_{group}_{scales}": _C.CodedForm(kind, group, scales, "zeros")
        for kind in ("int4", "int8")
        for group in (32, 64, 128)
        for scales in ("float16", "bfloat16")
    },
}


def coded_format(coding: Coding, columns: int) -> str | None:
    """Returns the format that keeps the codes of a weight of so many columns; None without a kernel for it."""
    kind = "int8" if coding.kind == "iq4" else coding.kind
    groups = [16] if coding.minima else [128, 64, 32] if kind in ("int4", "int8") else [128, 32, 16]
    for group in groups:
        name = "int4_min16" if coding.minima else "e4m3" if kind == "e4m3" else f"{kind}_{group}"
        form = FORMS.get(name)
        if form and form.kind == kind and (coding.group % form.group == 0 or coding.group >= columns):
            return name if columns % 8 == 0 else None
    return None


def empty_weight(rows: int, columns: int, format: str, device: torch.device) -> Weight:
    """Room for a weight [rows, columns] on CUDA: floats, or codes of a format in FORMS, whose padding is zeros."""
    if format not in FORMS:
        return empty_weight_reference(rows, columns, format, device)
    size = sum(_sizes(FORMS[format]))
    data = torch.zeros(-(-rows // ROWS), -(-columns // COLUMNS), size, dtype=torch.uint8, device=device)
    return Weight(data, rows, format)


def pack_linear(rows: torch.Tensor, weight: Weight, first: int) -> None:
    """Writes rows [R, C] of floats: as floats, or with the codes and scales of the CPU's pack_linear to q8 and q4_min.

    Raises ValueError for another coded format.
    """
    if weight.format in FLOAT_FORMATS:
        return pack_linear_reference(rows, weight, first)
    if weight.format not in ("q8", "q4_min"):
        raise ValueError(f"weight: floats are quantised to q8 or q4_min, got {weight.format}")
    values = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % 32)).unflatten(1, (-1, 32))
    low, high = values.amin(2).clamp(max=0), values.amax(2).clamp(min=0)
    with_minima = weight.format == "q4_min"
    step = (high - low) / 15 if with_minima else torch.maximum(high, -low) / 127
    scales = step.half().float()  # codes are chosen for the scale as it is kept
    offsets = low.half().float() if with_minima else torch.zeros_like(low)
    broken = ~(scales.isfinite() & offsets.isfinite() & values.isfinite().all(2))
    scales, offsets = scales.masked_fill(broken, torch.nan), offsets.masked_fill(broken, 0)
    inverse = torch.where(scales > 0, 1 / scales, 0)
    least, most = (0, 15) if with_minima else (-127, 127)
    codes = ((values - offsets[..., None]) * inverse[..., None]).clamp(least, most).round()
    codes = codes.masked_fill(broken[..., None], 0).add(0 if with_minima else 128)
    _write(codes.flatten(1).to(torch.uint8), scales, None, offsets if with_minima else None, weight, first)


def pack_blocks(rows: torch.Tensor, weight: Weight, first: int, kind: str) -> None:
    """Writes rows of a GGUF file, uint8 [R, row_bytes] of a type in PACKED_BLOCKS; codes and scales stay."""
    pack_coded(coded_blocks(rows, kind), weight, first)


def pack_coded(coded: CodedRows, weight: Weight, first: int) -> None:
    """Writes coded rows to rows [first, first + R) of a weight whose format holds them exactly.

    "iq4" is held by 8-bit codes of numbers. A NaN of e4m3 makes the scale of its group NaN. Raises ValueError where the
    format cannot hold the kind, groups, scales, zeros or minima.
    """
    form, coding, codes, zeros = FORMS[weight.format], coded.coding, coded.codes, coded.zeros
    columns, kind = codes.shape[1], coding.kind
    if kind == "iq4":
        kind, codes = "int8", (NUMBERS["iq4"].to(codes.device)[codes.int()] + 128).to(torch.uint8)
        zeros = torch.full_like(coded.scales, 128, dtype=torch.uint8)
    if kind != form.kind:
        raise ValueError(f"coded: {weight.format} holds {form.kind}, got {coding.kind}")
    if coding.group % form.group and coding.group < columns:
        raise ValueError(
            f"coded: {weight.format} holds groups of a multiple of {form.group} columns, got {coding.group}"
        )
    wrong = coded.minima is not None and form.offset != "minima" and "minima"
    if zeros is None:
        wrong = wrong or (form.offset == "middle" and "codes without zero points")
    elif form.offset == "middle":
        wrong = wrong or (bool((zeros != _MIDDLE[kind]).any()) and f"zero points other than {_MIDDLE[kind]}")
    elif form.offset != "zeros":
        wrong = wrong or (bool(zeros.any()) and "zero points")
    if wrong:
        raise ValueError(f"coded: {weight.format} has no {wrong}")
    scales = coded.scales.float()
    if kind == "e4m3":
        broken = (codes & 0x7F) == 0x7F
        padded = torch.nn.functional.pad(broken, (0, scales.shape[1] * coding.group - columns))
        scales = scales.masked_fill(padded.unflatten(1, (-1, coding.group)).any(2), torch.nan)
    place = (torch.arange(0, columns, form.group, device=codes.device) // coding.group).clamp(max=scales.shape[1] - 1)
    wide = [None if x is None else x[:, place] for x in (scales, zeros, coded.minima)]
    _write(codes, wide[0], wide[1], wide[2], weight, first)


def coded_values(weight: Weight, columns: int) -> torch.Tensor:
    """Returns the values of a coded weight as float32 [N, columns]; the reference of all kernels that read it."""
    form = FORMS[weight.format]
    codes, scales, minima, zeros = _parts(weight)
    panels, chunks = weight.data.shape[:2]
    if _KINDS[form.kind] == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    # [panel, half, row, chunk, piece, lane of the quad, block of the piece, column]
    codes = codes.unflatten(-1, (-1, 8)).permute(0, 2, 4, 1, 3, 6, 5, 7).reshape(panels * ROWS, chunks * COLUMNS)

    def spread(groups: torch.Tensor) -> torch.Tensor:
        return groups.permute(0, 3, 1, 2).reshape(panels * ROWS, -1).repeat_interleave(form.group, dim=1)

    dtype = getattr(torch, form.scales)
    numbers = NUMBERS[form.kind].to(codes.device)[codes.int()]
    if form.offset in ("zeros", "middle"):
        numbers = numbers - (spread(zeros.float()) if form.offset == "zeros" else _MIDDLE[form.kind])
    values = numbers * spread(scales.contiguous().view(dtype).float().squeeze(-1))
    if form.offset == "minima":
        values = values + spread(minima.contiguous().view(dtype).float().squeeze(-1))
    return values[: weight.rows, :columns]


def _sizes(form: _C.CodedForm) -> tuple[int, int, int, int]:
    """Returns the bytes of a chunk's codes, scales, minima and zeros."""
    groups = ROWS * COLUMNS // form.group
    scales = groups * getattr(torch, form.scales).itemsize
    minima = scales if form.offset == "minima" else 0
    return ROWS * COLUMNS * _KINDS[form.kind] // 8, scales, minima, groups if form.offset == "zeros" else 0


def _parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns views of a weight's parts, P panels of S chunks.

    Codes [P, S, half, piece, row, lane, 16]; scales and minima [P, S, group, row, bytes]; zeros [P, S, group, row].
    """
    form = FORMS[weight.format]
    codes, scales, minima, zeros = weight.data.split(_sizes(form), dim=-1)
    groups = COLUMNS // form.group
    wide = [x.unflatten(-1, (groups, ROWS, -1)) if x.shape[-1] else x for x in (scales, minima)]
    return (
        codes.unflatten(-1, (2, _KINDS[form.kind] // 4, 8, 4, 16)),
        *wide,
        zeros.unflatten(-1, (groups, ROWS)) if zeros.shape[-1] else zeros,
    )


def _write(codes, scales, zeros, minima, weight: Weight, first: int) -> None:
    """Writes rows with one code a byte [R, C], and scales, zeros and minima of the format's groups."""
    form, device = FORMS[weight.format], weight.data.device
    if first < 0 or first + len(codes) > weight.rows:
        raise ValueError(f"first: {len(codes)} rows from {first} on do not fit in {weight.rows} rows")
    chunks, dtype = weight.data.shape[1], getattr(torch, form.scales)
    if -(-codes.shape[1] // COLUMNS) != chunks:
        raise ValueError(f"rows: {codes.shape[1]} columns do not fill {chunks} chunks of {COLUMNS}")

    def padded(x: torch.Tensor, count: int) -> torch.Tensor:
        """[R, chunks, count], of 0 where x has no column."""
        x = x.to(device)
        return torch.nn.functional.pad(x, (0, chunks * count - x.shape[1])).unflatten(1, (chunks, count))

    kept = scales.to(dtype), None if minima is None else minima.to(dtype)
    for name, own, exact in (("scales", kept[0], scales), ("minima", kept[1], minima)):
        if own is not None and not torch.equal(own.float().nan_to_num(0, 1, -1), exact.float().nan_to_num(0, 1, -1)):
            raise ValueError(f"coded: {weight.format} holds {name} of {form.scales}, which would round these")
    rows = torch.arange(first, first + len(codes), device=device)
    panel, row = rows // ROWS, rows % ROWS
    to_codes, to_scales, to_minima, to_zeros = _parts(weight)
    packed = padded(codes, COLUMNS).unflatten(2, (_KINDS[form.kind] // 4, -1, 4, 8)).transpose(3, 4).flatten(4)
    if _KINDS[form.kind] == 4:
        packed = packed[..., ::2] | packed[..., 1::2] << 4
    to_codes.permute(0, 2, 4, 1, 3, 5, 6)[panel, row // 8, row % 8] = packed
    groups = COLUMNS // form.group
    size = dtype.itemsize

    def of_bytes(x: torch.Tensor) -> torch.Tensor:
        return padded(x, groups).contiguous()[..., None].view(torch.uint8).view(*x.shape[:1], chunks, groups, size)

    to_scales.permute(0, 3, 1, 2, 4)[panel, row] = of_bytes(kept[0])
    if form.offset == "minima" and kept[1] is not None:
        to_minima.permute(0, 3, 1, 2, 4)[panel, row] = of_bytes(kept[1])
    if form.offset == "zeros" and zeros is not None:
        to_zeros.permute(0, 3, 1, 2)[panel, row] = padded(zeros, groups)
