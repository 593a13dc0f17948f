"""The constrained requests of a batch on the host: masks of their trees, computed while the target runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import torch

from specengine.draft_trees.tree import DraftTree
from specengine.engine.request import Request

_workers = ThreadPoolExecutor(thread_name_prefix="specengine-masks")  # starts threads when they are needed


class TreeMasks:
    """Computes the masks of a batch's trees, cycle after cycle.  vocab_size: of the model."""

    def __init__(self, requests: Sequence[Request], vocab_size: int) -> None:
        self._requests, self._words = requests, -(-vocab_size // 32)
        self._rows = torch.empty(0, self._words, dtype=torch.int32)
        self._under_way: list[Future[None]] = []

    def start(self, trees: Sequence[DraftTree]) -> None:
        """Begins to compute the masks of these trees."""
        starts = list(accumulate((len(tree.tokens) for tree in trees), initial=0))
        if len(self._rows) < starts[-1]:
            self._rows = torch.empty(starts[-1], self._words, dtype=torch.int32)
        self._size, rows = starts[-1], self._rows.numpy()
        for request, tree, first in zip(self._requests, trees, starts, strict=False):
            own = rows[first : first + len(tree.tokens)]
            if request.constraint is None:
                own[:] = -1
            else:
                self._under_way.append(_workers.submit(request.constraint.fill, tree, own))

    def finish(self) -> torch.Tensor:
        """Returns the masks, int32 [M, W], valid until the next start(); rows without a constraint are all ones."""
        for future in self._under_way:
            future.result()
        self._under_way.clear()
        return self._rows[: self._size]


def masked(scores: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Returns scores with -inf for tokens whose bit is 0."""
    bits = (masks[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return scores.masked_fill(bits.flatten(1)[:, : scores.shape[1]] == 0, -torch.inf)
