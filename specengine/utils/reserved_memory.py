"""Arrays in address space of their own: the system gives memory to what is written, and takes it back on request.

So an array whose need is not known can be made larger than it will be, and never has to be moved.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

# Bytes of an array whose need is not known. Keys and values of two million tokens of an 8B model fit into two of them,
# and more than two hundred engines into the 2**47 bytes of a process.
RESERVED = 1 << 38
_PARTS = 4  # an array whose need is not known takes at most one of so many parts of what a process has left
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it from 3.13 on


def reservable() -> int:
    """Returns the bytes of an array whose need is not known: RESERVED, or fewer in a process with little address space.

    What comes after it must fit too: values beside keys, a drafter's cache, threads and what they compute.
    """
    size = RESERVED
    while size > mmap.PAGESIZE:
        with suppress(OSError):
            _reserve(_PARTS * size).close()
            break
        size //= 2
    return size


def _reserve(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)


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
            self._memory = _reserve(size)
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
