"""What one native call per draft takes and gives: runs of tokens as rows, the children of all levels, a backbone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate, chain
from math import exp

import numpy as np
import torch

from specengine.draft_trees.scored_tree import ScoredTree

Children = tuple[list[list[list[int]]], list[list[list[float]]]]  # tokens and log-probabilities, [B][levels][k]


def chain_rows(runs: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens of all runs, int32 [M], and where each request's rows begin, int32 [B + 1]."""
    tokens = np.array(runs[0] if len(runs) == 1 else [*chain(*runs)], dtype=np.int32)
    row_start = np.array([*accumulate(map(len, runs), initial=0)], dtype=np.int32)
    return torch.from_numpy(tokens), torch.from_numpy(row_start)


class DraftedLevels(threading.local):
    """Makes room for outputs once per thread and shape: after a target's pass, fresh memory would miss every cache.

    Engines may share a drafter, and each has a lock of its own. top_k: children per level.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self._made: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by requests and levels

    def room(self, batch: int, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns children int32 and scores float32 [B, T, k], which the thread's next draft of this shape reuses."""
        if (batch, levels) not in self._made:
            shape = (batch, levels, self._top_k)
            self._made[batch, levels] = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
        return self._made[batch, levels]


def backbone(root: int, tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], levels: int) -> ScoredTree:
    """Returns the first `levels` levels below a root; the likeliest token of each level has children.

    tokens, scores: of each level, likeliest first; scores are log-probabilities given the likeliest token above.
    """
    nodes, parents, chances, above = [root], [-1], [1.0], 0
    for own, log_probs in zip(tokens[:levels], scores[:levels], strict=True):
        parents += [above] * len(own)
        above = len(nodes)
        nodes += own
        chances += map(exp, log_probs)
    return ScoredTree(nodes, parents, chances)
