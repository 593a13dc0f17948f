"""Tensors that take a while to make and are kept in the cache folder, beside packed weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress

import torch

from specengine.utils.cache_dir import cache_dir
from specengine.utils.kept_weights import UNREADABLE, code_that_packs, read_file, write_file


def kept_tensors(key: str, make: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns what make() returned at an earlier call, mapped from its file where that is intact, else what it returns.

    key: a digest of what make() reads; with that of its code it names the file.
    """
    folder = None
    with suppress(RuntimeError):  # no home folder
        folder = cache_dir()
    if folder is None:
        return make()
    about = [key, code_that_packs()]
    path = folder / "weights" / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    with suppress(*UNREADABLE):
        return read_file(path, about)[0]
    tensors = make()
    write_file(path, about, tensors)
    return tensors


def most_unpacked(size: int) -> int:
    """Returns how many bytes `size` compressed ones may become: a hostile file must not fill the memory."""
    return (1 << 20) + 64 * size
