"""Damage to files: of their bytes, and of the structures inside them, which bytes alone seldom reach."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutation = Callable[[Sequence[bytes], Random], bytes]  # of intact files, one damaged

_NUMBERS = [struct.pack(form, n) for form in ("<B", "<H", "<I", "<Q") for n in (0, 1, 127, 255)]
_NUMBERS += [b"\xff" * n for n in (1, 2, 4, 8)] + [struct.pack("<Q", 1 << n) for n in (31, 32, 40, 62, 63)]
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), "", "x", "\ud800", "\x00", "é" * 9, "../../etc/passwd"),
    *("/etc/passwd", "a" * 300, "{{ x }}", [], {}, [[]], [None], {"": {}}, {"type": "x"}, [0, 1, 2], ["a", "b"]),
]
_NESTED = "@nested@"  # becomes lists too deep for Python's parser, or deep enough for its printer


def damaged_bytes(seeds: Sequence[bytes], draw: Random) -> bytes:
    """A few changes anywhere: bits, runs, numbers, copies, cuts."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        at = draw.randrange(len(data) + 1) if draw.random() < 0.5 else draw.randrange(min(len(data), 600) + 1)
        kind = draw.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            number = draw.choice(_NUMBERS)
            data[at : at + len(number)] = number
        elif kind == 2:
            del data[at : at + draw.choice((1, 2, 8, 64, 4096))]
        elif kind == 3:
            other = draw.choice(seeds)
            begin = draw.randrange(len(other) + 1)
            data[at:at] = other[begin : begin + draw.choice((1, 4, 16, 300))]
        elif kind == 4:
            data[at : at + 4] = draw.randbytes(4)
        elif draw.random() < 0.2:
            del data[at:]
    return bytes(data)


def damaged_json(seeds: Sequence[bytes], draw: Random) -> bytes:
    """JSON with a few other values, keys and places; now and then damaged bytes."""
    if draw.random() < 0.15:
        return damaged_bytes(seeds, draw)
    try:
        value = json.loads(draw.choice(seeds))
    except (ValueError, RecursionError):  # what coverage kept of damaged bytes
        return damaged_bytes(seeds, draw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        value = _changed(value, draw)
    return _spelled(value, draw)


def damaged_lines(seeds: Sequence[bytes], draw: Random) -> bytes:
    """JSON lines, one of them damaged."""
    lines = draw.choice(seeds).split(b"\n")
    at = draw.randrange(len(lines))
    return b"\n".join([*lines[:at], damaged_json([lines[at] or b"{}"], draw), *lines[at + 1 :]])


def damaged_safetensors(seeds: Sequence[bytes], draw: Random) -> bytes:
    """The header as JSON, of the length it then has."""
    data = draw.choice(seeds)
    if len(data) < 8 or draw.random() < 0.3:
        return damaged_bytes(seeds, draw)
    (length,) = struct.unpack("<Q", data[:8])
    header = damaged_json([data[8 : 8 + length]], draw)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


def damaged_torch_file(seeds: Sequence[bytes], draw: Random) -> bytes:
    """A zip file whose entries are damaged and whose checksums are right."""
    if draw.random() < 0.2:
        return damaged_bytes(seeds, draw)
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(draw.choice(seeds))) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                content = old.read(entry)
                if entry.filename.endswith("data.pkl") or draw.random() < 0.05:
                    content = damaged_bytes([content], draw)
                packing = zipfile.ZIP_DEFLATED if draw.random() < 0.02 else zipfile.ZIP_STORED
                new.writestr(zipfile.ZipInfo(entry.filename), content, packing)
    except Exception:  # what coverage kept of damaged bytes
        return damaged_bytes(seeds, draw)
    return out.getvalue()


def _changed(value: Any, draw: Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key, kind = draw.choice([*value]), draw.random()
        if kind < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if kind < 0.15:
            return {draw.choice(("", "x", key + "x")) if k == key else k: v for k, v in value.items()}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        at, kind = draw.randrange(len(value)), draw.random()
        if kind < 0.1:
            return value[:at] + value[at + 1 :]
        if kind < 0.2:
            return [*value, value[at]]
        return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    if type(value) in (int, float) and draw.random() < 0.3:
        return draw.choice((-value, value + 1, value * 2, value // 2))
    if isinstance(value, str) and draw.random() < 0.3:
        return draw.choice((value + value, value[1:], value.upper(), value + "\n"))
    return draw.choice([*_VALUES, _NESTED])


def _spelled(value: Any, draw: Random) -> bytes:
    depth = draw.choice((60, 450, 900, 5000))
    text = json.dumps(value, ensure_ascii=draw.random() < 0.9)
    return text.replace(f'"{_NESTED}"', "[" * depth + "]" * depth).encode("utf-8", "surrogatepass")
