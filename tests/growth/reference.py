"""Trees by definition: every node that could be is listed with its score, and the shape chooses among them.

A node is the tuple of ranks on its path; children_of(path) gives its children's log-probabilities, likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import exp

import numpy as np
import torch

Path = tuple[int, ...]
Children = Callable[[Path], Sequence[float]]


def score_of(path: Path, children_of: Children) -> float:
    """The log-probability of a path: float64 sums of float32 numbers, from the root on."""
    total = 0.0
    for depth, rank in enumerate(path):
        total += children_of(path[:depth])[rank]
    return total


def paths(children: int, levels: int) -> list[Path]:
    return [path for depth in range(1, levels + 1) for path in product(range(children), repeat=depth)]


def ddtree(children_of: Children, children: int, nodes: int, levels: int) -> list[Path]:
    """The likeliest paths; of equals the one with the lower ranks."""
    every = paths(children, levels)
    return sorted(every, key=lambda path: (-score_of(path, children_of), path))[: nodes - 1]


def jetspec(children_of: Children, children: int, nodes: int, levels: int, beta: float | None = None) -> list[Path]:
    """The likeliest node without children gets all of them, again and again; of equals the earlier node.

    beta: top2gap's, None: every node has as many.
    """
    tree, opened = [()], set()
    while len(tree) < nodes:
        waiting = [path for path in tree if path not in opened and len(path) < levels]
        if not waiting:
            break
        best = max(waiting, key=lambda path: (score_of(path, children_of), -tree.index(path)))
        opened.add(best)
        tree += [(*best, rank) for rank in range(kept_of(children_of(best), beta))]
    return tree[1:nodes]


def kept_of(log_probs: Sequence[float], beta: float | None) -> int:
    if beta is None or len(log_probs) == 1:
        return len(log_probs) if beta is None else 1
    share = 1 / (1 + exp(min(beta * (log_probs[0] - log_probs[1] - 1), 700.0)))
    return max(1, round(len(log_probs) * share))


def backbone(children_of: Children, levels: int, widths: Sequence[int], thresholds: Sequence[float]) -> list[Path]:
    """A level's likeliest token has the next level's as its children."""
    found: list[Path] = []
    for level in range(levels):
        above = (0,) * level
        # thresholds are float32, and so is the chance
        sure = np.exp(np.float32(children_of(above)[0])) > np.asarray(thresholds, dtype=np.float32)
        found += [(*above, rank) for rank in range(widths[int(sure.sum())])]
    return found


def confident(log_probs: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
    """The logarithms of chances of children [R, k]: the first one's is its confidence [R], others share the rest."""
    chances = log_probs.exp()
    rest = ((1 - confidence[:, None]) / (1 - chances[:, :1]).clamp(min=1e-6)).clamp(max=1.0)
    return torch.cat([confidence[:, None], chances[:, 1:] * rest], 1).clamp(1e-30, 1.0).log()
