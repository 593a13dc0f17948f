"""The calls that a captured cycle must not make, because the host would wait for the device or be read by it."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# Calls whose result, or the size of it, the host must know.
SYNCHRONISE = {
    aten._local_scalar_dense: "reads a number on the host",
    aten.equal: "reads a truth on the host",
    aten.is_nonzero: "reads a truth on the host",
    aten.nonzero: "has as many rows as the device finds",
    aten.masked_select: "has as many entries as the device finds",
    aten.repeat_interleave: "has as many entries as the device counts",
    aten._unique2: "has as many entries as the device finds",
    aten.unique_dim: "has as many rows as the device finds",
    aten.unique_consecutive: "has as many entries as the device finds",
    aten.bincount: "has as many entries as the device counts",
    aten._linalg_check_errors: "reads on the host what the device found",
}
COPIES = (aten._to_copy, aten.copy_)
INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
MASKS = (torch.bool, torch.uint8)


class Refused(RuntimeError):
    """A call that would fail while a graph is captured, or would make the host wait."""


def check_call(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raises Refused for a call that waits for the device, or that copies between host and device."""
    packet = func.overloadpacket
    if packet in SYNCHRONISE:
        raise Refused(f"{packet}: {SYNCHRONISE[packet]}")
    if packet in INDEXING and any(index is not None and index.dtype in MASKS for index in args[1]):
        raise Refused(f"{packet}: a mask selects as many entries as the device finds")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    places = {tensor.device.type for tensor in tensors if packet in COPIES or not _passed_by_value(tensor)}
    if kwargs.get("device") is not None:
        places.add(torch.device(kwargs["device"]).type)
    if len(places) > 1:
        raise Refused(f"{packet}: copies between host and device")


def _passed_by_value(tensor: torch.Tensor) -> bool:
    """A number on the host is an argument of the kernel."""
    return tensor.dim() == 0 and tensor.device.type == "cpu"
