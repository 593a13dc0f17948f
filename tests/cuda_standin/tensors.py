"""Tensors on the stand-in device and in pinned memory: they hold CPU memory, and say where they are."""

from __future__ import annotations

import torch

from tests.cuda_standin.allocator import Block
from tests.cuda_standin.device import CUDA, Device
from tests.cuda_standin.streams import Accesses

POISON = 0x7F  # of every byte of new integers: far out of every range; new floats are NaN


class Wrapper(torch.Tensor):
    """A tensor around CPU memory, `inner`."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func}: a tensor of the stand-in is used in a thread that does not know the stand-in")


class DeviceTensor(Wrapper):
    """A tensor that says it is on cuda:0.  block: the memory that it and its views hold."""

    block: Block

    @staticmethod
    def of(inner: torch.Tensor, block: Block) -> DeviceTensor:
        """Makes the tensor of some memory."""
        return _wrapped(DeviceTensor, inner, CUDA, block=block)

    def tolist(self) -> list:
        return self.cpu().tolist()

    def numpy(self, *_: object, **__: object) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")

    __array__ = numpy

    def is_pinned(self, *_: object) -> bool:
        return False


class PinnedTensor(Wrapper):
    """A tensor in pinned host memory.  accesses: those of the device."""

    accesses: Accesses
    device_of: Device

    @staticmethod
    def of(inner: torch.Tensor, accesses: Accesses, device: Device) -> PinnedTensor:
        """Makes the tensor of some memory."""
        return _wrapped(PinnedTensor, inner, torch.device("cpu"), accesses=accesses, device_of=device)

    def tolist(self) -> list:
        self.device_of.host_uses(self.accesses, False, "tolist")
        return self.inner.tolist()

    def numpy(self, *_: object, **__: object):
        self.device_of.host_uses(self.accesses, False, "numpy")
        return self.inner.numpy()

    def is_pinned(self, *_: object) -> bool:
        return True


def _wrapped(kind, inner: torch.Tensor, device: torch.device, **attributes):
    tensor = torch.Tensor._make_wrapper_subclass(
        kind,
        inner.shape,
        strides=inner.stride(),
        storage_offset=inner.storage_offset(),
        dtype=inner.dtype,
        layout=inner.layout,
        device=device,
    )
    tensor.inner = inner
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


def poison(memory: torch.Tensor, dtype: torch.dtype) -> None:
    """Fills raw memory with values that show where they are used by mistake."""
    if dtype.is_floating_point:
        memory.view(dtype).fill_(float("nan"))
    else:
        memory.fill_(POISON)
