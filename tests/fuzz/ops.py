"""Arguments of the extension's ops, spoiled as bytes say: the number of the op, then eight for each change."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.fuzz.contract import Harness
from tests.ops.arguments import OPS, call

_CHANGE = struct.Struct("<BBHi")  # argument, kind of change, place, value
_INTEGERS = (0, 1, -1, 2, 3, 7, 16, 64, 255, 10**6, 2**30, 2**31 - 1, -(2**31))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-40, 3e38, -3e38, float("nan"), float("inf"), -float("inf"))
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int32, torch.int64, torch.bool)


def _entry(tensor: torch.Tensor, place: int, value: int) -> torch.Tensor:
    """The tensor with another value in one of its entries, often one that no array has room for."""
    changed = tensor.clone(memory_format=torch.contiguous_format)
    if changed.numel():
        flat, at = changed.view(-1), place % changed.numel()
        if changed.is_floating_point():
            flat[at] = _FLOATS[value % len(_FLOATS)]
        else:
            number = _INTEGERS[value % len(_INTEGERS)] if value % 3 else value % 97 - 8
            flat[at] = number & 127 if changed.dtype in (torch.uint8, torch.bool) else number
    return changed


def _shape(tensor: torch.Tensor, place: int, value: int) -> torch.Tensor:
    """The tensor with another size, order or number of dimensions."""
    kind, axis = value % 6, place % max(1, tensor.dim())
    if kind == 0 or tensor.dim() == 0:
        return tensor.unsqueeze(0)
    if kind == 1:
        return tensor.narrow(axis, 0, value // 6 % (tensor.shape[axis] + 1)).contiguous()
    if kind == 2:
        return torch.cat([tensor, tensor.narrow(axis, 0, min(1, tensor.shape[axis]))], axis)
    if kind == 3:
        return tensor.transpose(0, axis)
    if kind == 4:
        return tensor.select(axis, 0) if tensor.shape[axis] else tensor.flatten()
    return tensor[..., ::2]


def _changed(value: Any, kind: int, place: int, number: int) -> Any:
    if isinstance(value, torch.Tensor):
        if kind % 8 == 0:
            return None
        if kind % 8 == 1:
            return value.to(_DTYPES[number % len(_DTYPES)])
        return _shape(value, place, number) if kind % 8 == 2 else _entry(value, place, number)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return _INTEGERS[number % len(_INTEGERS)]
    return _FLOATS[number % len(_FLOATS)] if isinstance(value, float) else value


def _call(path: Path) -> None:
    data = path.read_bytes()
    op = list(OPS)[(data[0] if data else 0) % len(OPS)]
    torch.manual_seed(0)
    arguments = OPS[op]()
    names = list(arguments)
    for argument, kind, place, number in _CHANGE.iter_unpack(
        data[1 : 1 + (len(data) - 1) // _CHANGE.size * _CHANGE.size]
    ):
        name = names[argument % len(names)]
        arguments[name] = _changed(arguments[name], kind, place, number)
    call(op, arguments)


def _seeds() -> list[bytes]:
    return [bytes([number]) for number in range(len(OPS))]


def _spoiled(seeds: Sequence[bytes], draw: Random) -> bytes:
    data = draw.choice(seeds)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data += _CHANGE.pack(
            draw.randrange(64), draw.randrange(8), draw.randrange(1 << 16), draw.randrange(-99, 1 << 20)
        )
    return data[: 1 + 6 * _CHANGE.size]


_NAMES = tuple({name for make in OPS.values() for name in make()})
HARNESSES = (Harness("op arguments", _seeds, _call, _NAMES, "arguments", _spoiled),)
