"""tensor[index] of fake tensors. torch's own code asks the CUDA driver first, which a CPU build of torch lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

Parts = tuple[torch.Tensor, list[torch.Tensor | None]]  # a view, and the index tensors of its dimensions


DIRECT = {
    torch.Tensor.copy_: torch.ops.aten.copy_,
    torch.Tensor.nonzero: torch.ops.aten.nonzero,
    torch.nonzero: torch.ops.aten.nonzero,
    torch.Tensor.contiguous: torch.ops.aten.contiguous,
    torch.Tensor.__int__: torch.ops.aten._local_scalar_dense,
    torch.Tensor.__index__: torch.ops.aten._local_scalar_dense,
    torch.Tensor.__float__: torch.ops.aten._local_scalar_dense,
}


class Indexing(TorchFunctionMode):
    """Turns reads and writes by index into the calls that torch makes of them; some other methods need it too."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func in DIRECT and isinstance(args[0], FakeTensor):
            return DIRECT[func](*args, **(kwargs or {}))
        read, write = func is torch.Tensor.__getitem__, func is torch.Tensor.__setitem__
        if not (read or write) or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        view, places = _parts(args[0], args[1])
        if read:
            return torch.ops.aten.index(view, places) if places else view
        return _write(view, places, args[2])


def _write(view: torch.Tensor, places: list[torch.Tensor | None], value: Any) -> None:
    if places:
        if not isinstance(value, torch.Tensor):  # torch copies the number to the device for the scatter
            value = torch.tensor(value, dtype=view.dtype).to(view.device)
        torch.ops.aten.index_put_(view, places, value)
    elif isinstance(value, torch.Tensor):
        torch.ops.aten.copy_(view, value)
    else:
        view.fill_(value)


def _parts(tensor: torch.Tensor, index: Any) -> Parts:
    items = index if isinstance(index, tuple) else (index,)
    used = sum(item is not None and item is not Ellipsis for item in items)
    view, dim, places = tensor, 0, list[torch.Tensor | None]()
    for item in items:
        if item is Ellipsis:
            dim += tensor.dim() - used
        elif item is None:
            view, dim = view.unsqueeze(dim), dim + 1
        elif isinstance(item, int):
            view = view.select(dim, item)
        elif isinstance(item, slice):
            view, dim = torch.ops.aten.slice(view, dim, _end(item.start), _end(item.stop), item.step or 1), dim + 1
        else:  # a list becomes a tensor on the device, by a copy from pageable memory
            place = item if isinstance(item, torch.Tensor) else torch.tensor(item).to(tensor.device)
            places += [None] * (dim - len(places)) + [place]
            dim += 1
    return view, places


def _end(end: Any) -> Any:
    """Returns an end of a slice, which torch reads on the host."""
    return torch.ops.aten._local_scalar_dense(end) if isinstance(end, torch.Tensor) else end
