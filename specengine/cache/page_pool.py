"""Memory for keys and values in pages; the cache says which request owns which page."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from specengine._C import PAGE_SIZE


def page_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Returns the bytes of one page of keys and values.  shape: layers, key/value heads, head dim."""
    return 2 * dtype.itemsize * PAGE_SIZE * math.prod(shape)


class PagePool:
    """Holds keys and values in pages of PAGE_SIZE slots.  k, v: [layers, pages, K, PAGE_SIZE, D]."""

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, pages: int
    ) -> None:
        self._shape = (layers, kv_heads, head_dim)
        self.dtype, self.device = dtype, device
        self.k, self.v = self._empty(pages)

    def _empty(self, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
        layers, kv_heads, head_dim = self._shape
        shape = (layers, pages, kv_heads, PAGE_SIZE, head_dim)
        k, v = (torch.empty(shape, dtype=self.dtype, device=self.device) for _ in "kv")
        return k, v

    def copied(self, pages: int, kept: Mapping[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k and v of a pool of `pages` pages.  kept: old number -> new number of the pages that are copied."""
        k, v = self._empty(pages)
        for page, number in kept.items():
            k[:, number], v[:, number] = self.k[:, page], self.v[:, page]
        return k, v

    def copy_page(self, page: int, to: int) -> None:
        """Copies the keys and values of one page to another."""
        self.k[:, to], self.v[:, to] = self.k[:, page], self.v[:, page]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers, keys and values."""
        return page_bytes(self._shape, self.dtype)
