"""Arrays in address space of their own: the system gives memory to what is written, and takes it back on request.

So an array whose need is not known can be made larger than it will be, and never has to be moved.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import TypeVar

import torch

# Bytes of an array whose need is not known. Keys and values of two million tokens of an 8B model fit into two of them,
# and more than two hundred engines into the 2**47 bytes of a process.
RESERVED = 1 << 38
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on

T = TypeVar("T")


def make_largest(make: Callable[[int], T], count: int) -> T:
    """Returns make(count), or of half as many, and so on, where the process may not have the address space.

    Raises MemoryError where not even one fits.
    """
    while True:
        try:
            return make(count)
        except MemoryError:
            if count <= 1:
                raise
            count //= 2


class ReservedArray:
    """A tensor of unwritten memory on the CPU.  name: for the error.

    Raises MemoryError where the process may not have that much address space (`ulimit -v`, vm.overcommit_memory=2).
    """

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = prod(shape) * dtype.itemsize
        self._memory: mmap.mmap | None = None
        if size == 0:
            self.tensor = torch.empty(shape, dtype=dtype)
            return
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self._memory = mmap.mmap(-1, size, flags=flags)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{name}: no room for {size / 2**20:.0f} MiB") from error
        # Large pages would give 2 MiB to the first token's part of each layer.
        with suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.tensor = torch.frombuffer(self._memory, dtype=dtype).view(shape)

    def release(self, part: torch.Tensor) -> None:
        """Gives the memory of a contiguous part of the tensor back; the part is unwritten then.

        The system's pages that reach beyond the part keep their memory.
        """
        if self._memory is None or not part.numel():
            return
        begin = part.data_ptr() - self.tensor.data_ptr()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (begin + part.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, first, size)
