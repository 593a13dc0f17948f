"""A CUDA device that computes nothing: its tensors have shapes, types and a place, and its calls are counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from tests.fake_cuda.indexing import Indexing
from tests.fake_cuda.launches import Launches
from tests.fake_cuda.refused import check_call

CUDA = torch.device("cuda", 0)
# Calls that allocate or describe, and start no kernel.
STARTS_NOTHING = ("empty", "new_empty", "_unsafe_view", "sym_", "is_", "resize", "lift", "device_put")


class FakeCuda(FakeTensorMode):
    """Tensors on the host stay real; those on the device are fake.

    A read of the device on the host gives zeros and counts as a wait; in a captured() stretch it is refused.
    waits: the calls for which the host waited.  blocking_copies: to the device, which arrive before the call returns.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        self.blocking_copies = 0
        self._indexing = Indexing()
        self._launches: Launches | None = None
        self._strict = False
        self._inside = False  # of a call that torch makes of others

    def __enter__(self) -> FakeCuda:
        super().__enter__()
        self._indexing.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._indexing.__exit__(*error)
        super().__exit__(*error)

    @contextmanager
    def counted(self) -> Iterator[Launches]:
        """Counts the launches of a stretch."""
        before, self._launches = self._launches, Launches()
        try:
            yield self._launches
        finally:
            self._launches = before

    @contextmanager
    def captured(self) -> Iterator[Launches]:
        """Counts the launches of a stretch that a graph captures; Refused is raised for what it may not do."""
        self._strict = True
        try:
            with self.counted() as launches:
                yield launches
        finally:
            self._strict = False

    def launch(self, kernels: tuple[str, ...]) -> None:
        """Counts kernels of the core."""
        if self._launches is not None:
            self._launches.ours.update(kernels)

    def __torch_dispatch__(self, func: OpOverload, types, args=(), kwargs=None) -> Any:
        with torch._C.DisableTorchFunction():  # Indexing is for the code under test
            return self._dispatched(func, types, args, kwargs or {})

    def _dispatched(self, func: OpOverload, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        leaves = tree_leaves((args, kwargs))
        device = kwargs.get("device")
        on_device = device is not None and torch.device(device).type == "cuda"
        if not on_device and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return func(*args, **{**kwargs, "pin_memory": False} if "pin_memory" in kwargs else kwargs)
        if self._inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if self._strict:
            check_call(func, args, kwargs)
        if (read := self._read(func, args, kwargs)) is not None:
            return read
        self._inside = True
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False
        self._count(func, result)
        return result

    def _read(self, func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Zeros in place of what the host reads of the device, or None."""
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits.append(str(func))
            return torch.zeros((), dtype=args[0].dtype).item()
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device is not None and torch.device(device).type == "cpu":
            self.waits.append(str(func))
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if _copies_to_device(func, args, kwargs):
            self.blocking_copies += 1
        return None

    def _count(self, func: OpOverload, result: Any) -> None:
        name = func.overloadpacket.__name__
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if self._launches is None or not any(tensor.numel() for tensor in written):
            return
        starts_nothing = func.is_view or name.startswith(STARTS_NOTHING)
        (self._launches.views if starts_nothing else self._launches.torch)[name] += 1


def _copies_to_device(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a copy returns when it has arrived, behind all earlier work of the stream."""
    if func is not torch.ops.aten._to_copy.default or kwargs.get("non_blocking"):
        return False
    return args[0].device.type == "cpu" and torch.device(kwargs.get("device") or "cpu").type == "cuda"


def _numbers(tensor: FakeTensor) -> Any:
    return tensor.cpu().tolist()


FakeTensor.tolist = _numbers  # one copy, as of a tensor on a device; FakeTensor's own reads number by number
