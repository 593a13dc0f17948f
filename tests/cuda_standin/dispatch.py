"""Every operation of torch in a thread: which launch work on the device, which copy, and which make the host wait."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_standin.allocator import Block
from tests.cuda_standin.device import Device
from tests.cuda_standin.streams import Accesses
from tests.cuda_standin.tensors import DeviceTensor, PinnedTensor, Wrapper, poison

EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
# The host reads their result, or needs it for the shape.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2", "item")
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


class Dispatch(TorchDispatchMode):
    """Runs the operations of one thread on a stand-in device."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        place = kwargs.get("device")
        to_device = place is not None and torch.device(place).type == "cuda"
        name = func.overloadpacket.__name__
        if kwargs.pop("pin_memory", None):
            return self._pinned(func, args, kwargs)
        if name in ("copy_", "_to_copy") and self._crosses(args, kwargs, name):
            return self._copy(func, name, args, kwargs)
        if not on_device and not to_device:
            return self._on_host(func, name, args, kwargs, tensors)
        for tensor in tensors:
            if not isinstance(tensor, DeviceTensor) and tensor.dim():
                if name not in INDEXING:
                    raise RuntimeError(f"{name}: expected all tensors on one device, found cpu and cuda:0")
                self._device.wait(f"{name}: a pageable copy of indices")
        if to_device:
            kwargs["device"] = torch.device("cpu")
        if name in WAITING or (name in INDEXING and any(_is_mask(t) for t in pytree.tree_leaves(args[1]))):
            return self._waiting(func, name, args, kwargs, on_device)
        if name == "record_stream":
            args[0].block.recorded = True
            return None
        if func.is_view or name in ("detach", "alias", "lift_fresh", "_unsafe_view", "lift"):
            return self._views(func, args, kwargs)
        return self._launch(func, name, args, kwargs, on_device)

    def empty(self, shape, strides, dtype: torch.dtype) -> DeviceTensor:
        """Allocates a tensor on the device."""
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if 0 not in shape else 0
        block = self._device.allocate(extent * dtype.itemsize)
        memory = block.piece.memory(extent * dtype.itemsize)
        if not self._device.dry:
            poison(memory, dtype)
        return DeviceTensor.of(memory.view(dtype).as_strided(shape, strides), block)

    def _launch(self, func, name: str, args, kwargs, reads: list[DeviceTensor]):
        """Launches one kernel, whose results are new tensors or those that it changes."""
        inner_args, inner_kwargs = _inner((args, kwargs))
        if name in EMPTY:
            shaped = func(*inner_args, **{**inner_kwargs, "device": torch.device("meta")})
            return self.empty(shaped.shape, shaped.stride(), shaped.dtype)
        changed = _changed(func, args, kwargs)
        if changed:
            self._device.launch(lambda: func(*inner_args, **inner_kwargs), _blocks(reads), _blocks(changed), name=name)
            return changed[0] if len(changed) == 1 else tuple(changed)
        results = self._results(func, inner_args, inner_kwargs)
        flat, spec = pytree.tree_flatten(results)
        new = [self.empty(r.shape, r.stride(), r.dtype) if isinstance(r, torch.Tensor) else r for r in flat]
        outs = [tensor for tensor in new if isinstance(tensor, DeviceTensor)]
        targets = [out.inner for out in outs]
        ready = None if results is None or any(r.is_meta for r in flat if isinstance(r, torch.Tensor)) else flat

        def run() -> None:
            values = ready or pytree.tree_leaves(func(*inner_args, **inner_kwargs))
            values = [value for value in values if isinstance(value, torch.Tensor)]
            for target, value in zip(targets, values, strict=True):
                target.copy_(value)

        self._device.launch(run, _blocks(reads), _blocks(outs), name=name)
        return pytree.tree_unflatten(new, spec)

    def _results(self, func, args, kwargs):
        """Returns the results of a kernel, or while nothing is run tensors of their shapes."""
        if not self._device.dry and not self._device.captures():
            return func(*args, **kwargs)
        if "device" in kwargs:
            return func(*args, **{**kwargs, "device": torch.device("meta")})
        shapes = pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta") if t.dim() else t, (args, kwargs))
        return func(*shapes[0], **shapes[1])

    def _views(self, func, args, kwargs):
        source = args[0]
        inner_args, inner_kwargs = _inner((args, kwargs))
        views = func(*inner_args, **inner_kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda t: _like(source, t), views)

    def _waiting(self, func, name: str, args, kwargs, reads: list[DeviceTensor]):
        device = self._device
        device.wait(name)
        device.order(_blocks(reads), (), name)
        device.wait(name)
        inner_args, inner_kwargs = _inner((args, kwargs))
        value = func(*inner_args, **inner_kwargs)
        if not isinstance(value, torch.Tensor):
            return value
        out = self.empty(value.shape, value.stride(), value.dtype)
        out.inner.copy_(value)
        return out

    def _pinned(self, func, args, kwargs) -> PinnedTensor:
        if self._device.captures():
            raise self._device.refusals.refuse("pinned memory is allocated during a capture")
        return PinnedTensor.of(func(*args, **kwargs), Accesses(), self._device)

    def _on_host(self, func, name: str, args, kwargs, tensors):
        pinned = [tensor for tensor in tensors if isinstance(tensor, PinnedTensor)]
        if not pinned:
            return func(*args, **kwargs)
        if func.is_view or name in ("detach", "alias"):
            return self._views(func, args, kwargs)
        changed = _changed(func, args, kwargs)
        for tensor in pinned:
            self._device.host_uses(tensor.accesses, any(tensor is each for each in changed), name)
        inner_args, inner_kwargs = _inner((args, kwargs))
        result = func(*inner_args, **inner_kwargs)
        return changed[0] if changed else result

    def _crosses(self, args, kwargs, name: str) -> bool:
        """Whether a copy goes from host to device or back."""
        if name == "copy_":
            return isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor)
        place = kwargs.get("device")
        return place is not None and isinstance(args[0], DeviceTensor) != (torch.device(place).type == "cuda")

    def _copy(self, func, name: str, args, kwargs):
        device = self._device
        source = args[1] if name == "copy_" else args[0]
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if name == "copy_":
            target = args[0]
        elif isinstance(source, DeviceTensor):
            target = torch.empty_like(source.inner, dtype=kwargs.get("dtype") or source.dtype)
        else:
            inner = source.inner if isinstance(source, Wrapper) else source
            shaped = torch.empty_like(inner, dtype=kwargs.get("dtype") or source.dtype, device="meta")
            target = self.empty(shaped.shape, shaped.stride(), shaped.dtype)
        host = target if isinstance(source, DeviceTensor) else source
        if not isinstance(host, PinnedTensor):
            # From pageable memory the driver copies into a buffer of its own first; to it, the call returns at the end.
            if device.captures():
                raise device.refusals.refuse(f"{name}: copies pageable memory during a capture")
            waits = waits or host is target
        reads, writes = ([t.block] if isinstance(t, DeviceTensor) else [] for t in (source, target))
        into = target.inner if isinstance(target, Wrapper) else target
        value = source.inner if isinstance(source, Wrapper) else source
        fixed = value if isinstance(host, PinnedTensor) or host is target else value.clone()
        device.launch(lambda: into.copy_(fixed), reads, writes, name=name, always=host is target)
        if isinstance(host, PinnedTensor) and not device.captures():
            host.accesses.note((device.stream.id, device.stream.known[device.stream.id]), host is target)
        if waits:
            device.wait(name)
        return target


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _inner(tree):
    return pytree.tree_map_only(Wrapper, lambda tensor: tensor.inner, tree)


def _blocks(tensors: list[DeviceTensor]) -> list[Block]:
    return [tensor.block for tensor in tensors]


def _like(source: Wrapper, inner: torch.Tensor) -> Wrapper:
    if isinstance(source, DeviceTensor):
        return DeviceTensor.of(inner, source.block)
    assert isinstance(source, PinnedTensor)
    return PinnedTensor.of(inner, source.accesses, source.device_of)


def _changed(func, args, kwargs) -> list:
    """Returns the arguments that an operation writes: of `x.add_(y)` the first, of `out=` the last."""
    given: list = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            given += [each for each in pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]
    return given
