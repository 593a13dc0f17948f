"""Memory for keys and values in pages; the cache says which request owns which page."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specengine._C import PAGE_SIZE
from specengine.utils.host_memory import is_host
from specengine.utils.reserved_memory import ReservedArray


def page_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Returns the bytes of one page of keys and values.  shape: layers, key/value heads, head dim."""
    return 2 * dtype.itemsize * PAGE_SIZE * math.prod(shape)


class PagePool:
    """Holds keys and values in pages of PAGE_SIZE slots.  k, v: [layers, pages, K, PAGE_SIZE, D].

    On the CPU only written pages take memory. Raises MemoryError where there is no room.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, pages: int
    ) -> None:
        self._shape = (layers, kv_heads, head_dim)
        self.dtype, self.device = dtype, device
        shape = (layers, pages, kv_heads, PAGE_SIZE, head_dim)
        self._arrays: list[ReservedArray] = []
        if is_host(device):
            self._arrays = [ReservedArray("key/value cache", shape, dtype) for _ in "kv"]
            self.k, self.v = (array.tensor for array in self._arrays)
        else:
            self.k, self.v = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")

    def copy_page(self, page: int, to: int) -> None:
        """Copies the keys and values of one page to another."""
        self.k[:, to], self.v[:, to] = self.k[:, page], self.v[:, page]

    def release(self, pages: Sequence[int]) -> None:
        """Gives the memory of pages back to the system, on the CPU.  pages: in order."""
        for first, last in _runs(pages):
            for array in self._arrays:
                for layer in array.tensor:
                    array.release(layer[first : last + 1])

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, keys and values."""
        return page_bytes(self._shape, self.dtype)


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the first and last number of each run of adjacent pages."""
    starts = [i for i, page in enumerate(pages) if i == 0 or page != pages[i - 1] + 1]
    ends = [*(start - 1 for start in starts[1:]), len(pages) - 1]
    return [(pages[start], pages[end]) for start, end in zip(starts, ends, strict=True)] if pages else []
