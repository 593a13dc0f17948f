"""Memory in large pages for the weights that every pass reads.

The processor translates addresses page by page. With pages of 2 MiB in place of 4 KiB it reads weights about a tenth
faster (docs/design/cpu-kernels.md). Linux gives them to memory that asks for them.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod
from threading import Lock

import torch

PAGE = 2 << 20
CHUNK = 16 << 20  # weights smaller than a page share it with their neighbours
ALIGNMENT = 64  # of a weight: a line of the cache

_lock = Lock()
_chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the last one


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of zeros in large pages; elsewhere than on Linux in ordinary ones.

    Its memory is free again when no tensor of its chunk is left, but for that of the last chunk.
    """
    global _chunk
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    with _lock:
        if len(_chunk) < size:
            _chunk = _new_chunk(max(size, CHUNK))
        own, _chunk = _chunk[:size], _chunk[-(-size // ALIGNMENT) * ALIGNMENT :]
    return own.view(dtype).view(shape)


def _new_chunk(size: int) -> torch.Tensor:
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them: the pages are ordinary ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    first = -whole.data_ptr() % PAGE
    return whole[first : first + size]
