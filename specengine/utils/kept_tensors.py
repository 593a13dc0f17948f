"""Tensors that take a while to make and are kept in the cache folder, beside packed weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import torch

from specengine.utils.build_info import __version__
from specengine.utils.cache_dir import cache_dir
from specengine.utils.kept_weights import read_file, write_file


def kept_tensors(key: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns what make() returned at an earlier call, mapped from its file where that is intact, else what it returns.

    key: names the file, with the version of the package: a digest of what make() reads.
    """
    folder = None
    with suppress(RuntimeError):  # no home folder
        folder = cache_dir()
    if folder is None:
        return make()
    key = f"{key}-{__version__}"
    path = folder / "weights" / key
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError, MemoryError):
        tensors, _ = read_file(path, key)
        os.utime(path)
        return tensors
    tensors = make()
    write_file(path, key, tensors)
    return tensors


def most_unpacked(size: int) -> int:
    """Returns how many bytes `size` compressed ones may become: a hostile file must not fill the memory."""
    return (1 << 20) + 64 * size
