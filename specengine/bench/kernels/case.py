"""A case: one kernel at one size beside the same computation in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specengine.bench.kernels.timers import Call
from specengine.draft_trees.tree import DraftTree, TreeBatch


@dataclass(frozen=True)
class Case:
    """Holds the calls of one kernel at one size, and of the same computation in PyTorch.

    nbytes: least bytes read and written.  ours: calls by variant of the kernel.
    A call returns its result, or None if there is nothing to compare.
    """

    kernel: str
    size: str
    nbytes: int
    ours: dict[str, list[Call]]
    torch: list[Call]


def returning(out: torch.Tensor | None, function: Callable[..., object], *arguments: object) -> Call:
    """Returns a call of a function that returns `out`, the tensor that the function writes."""

    def run() -> torch.Tensor | None:
        function(*arguments)
        return out

    return run


def call_each(function: Callable[[Any], object], items: Iterable[Any]) -> list[Call]:
    """Returns a call of the function per item."""
    return [partial(function, item) for item in items]


def int_tensor(values: Any, device: torch.device) -> torch.Tensor:
    """Returns an int32 tensor."""
    return torch.as_tensor(values, dtype=torch.int32).to(device)


def binary_tree(nodes: int, device: torch.device) -> TreeBatch:
    """Returns a tree with two children per node, numbered level by level."""
    return TreeBatch.of([DraftTree([1] * nodes, [(node - 1) // 2 for node in range(nodes)])], device, masked=True)
