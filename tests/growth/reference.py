"""Trees by definition: every node that could be is listed with its score, and the shape chooses among them.

A node is the tuple of ranks on its path; children_of(path) gives its children's log-probabilities, likeliest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import exp, inf

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


@dataclass
class Tree:
    """A tree that grows level by level; column 0 is the root.

    width: how many nodes a level opens, the best ones, of equals the earlier.  paths: or all nodes, if they are given.
    columns: token, parent, depth (-1: there is no such node) and score of each.  opened: columns.  bits: the numbers
    of the opened nodes above each of them, and its own, in the order in which they were opened.
    """

    root: int
    known: bool
    width: int = 0
    paths: Sequence[Path] | None = None
    columns: list[tuple[int, int, int, float]] = field(default_factory=list)
    opened: list[int] = field(default_factory=lambda: [0])
    bits: list[int] = field(default_factory=lambda: [1])
    ranks: list[Path] = field(default_factory=lambda: [()])  # of each column
    count: int = 1  # opened nodes

    def __post_init__(self) -> None:
        self.columns.append((self.root, -1, 0, 0.0))

    def add(self, lists: Sequence[Sequence[tuple[int, float]]], last: bool) -> list[int]:
        """Adds the children of the opened nodes, token (-1: there is none) and log-probability; returns the rows that
        those which are opened next continue.
        """
        first, rows = len(self.columns), []
        for row, (above, children) in enumerate(zip(self.opened, lists, strict=True)):
            for rank, (token, log_prob) in enumerate(children):
                path = (*self.ranks[above], rank)
                if self.paths is not None and path not in self.paths:
                    continue
                _, _, depth, score = self.columns[above]
                depth = depth + 1 if self.known and token >= 0 <= depth else -1
                self.columns.append((token, above, depth, float(np.float32(score) + np.float32(log_prob))))
                self.ranks.append(path)
                rows.append(row)
        level = [*range(first, len(self.columns))]
        if last:
            chosen = []
        elif self.paths is not None:
            parents = {path[:-1] for path in self.paths}
            chosen = [column for column in level if self.ranks[column] in parents]
        else:
            chosen = sorted(level, key=lambda column: -self.columns[column][3])[: self.width]
        rows = [rows[column - first] for column in chosen]
        self.bits = [self.bits[row] | 1 << self.count + place for place, row in enumerate(rows)]
        self.opened, self.count = chosen, self.count + len(chosen)
        return rows


def nodes_of(columns: Sequence[tuple[int, int, int, float]], deepest: float = inf) -> dict[Path, float]:
    """The score of each node, by the tokens on its path, root first."""
    found: list[Path] = []
    for token, parent, _, _ in columns:
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return {path: each[3] for path, each in zip(found, columns, strict=True) if 0 <= each[2] <= deepest}


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


def width_of(highest: float, widths: Sequence[int], thresholds: Sequence[float]) -> int:
    """CAPE's: thresholds are float32, and so is the chance. highest: the likeliest child's log-probability."""
    return widths[int((np.exp(np.float32(highest)) > np.asarray(thresholds, dtype=np.float32)).sum())]


def backbone(children_of: Children, levels: int, widths: Sequence[int], thresholds: Sequence[float]) -> list[Path]:
    """A level's likeliest token has the next level's as its children."""
    found: list[Path] = []
    for level in range(levels):
        above = (0,) * level
        found += [(*above, rank) for rank in range(width_of(children_of(above)[0], widths, thresholds))]
    return found


def confident(log_probs: torch.Tensor, confidence: torch.Tensor) -> torch.Tensor:
    """The logarithms of chances of children [R, k]: the first one's is its confidence [R], others share the rest."""
    chances = log_probs.exp()
    rest = ((1 - confidence[:, None]) / (1 - chances[:, :1]).clamp(min=1e-6)).clamp(max=1.0)
    return torch.cat([confidence[:, None], chances[:, 1:] * rest], 1).clamp(1e-30, 1.0).log()


def beam(
    children_of: Children, levels: int, width: int, widths: Sequence[int], thresholds: Sequence[float] = ()
) -> list[Path]:
    """EAGLE-2's candidates: the `width` likeliest of a level have children, of equals the earlier ones."""
    found: list[Path] = []
    opened: list[Path] = [()]
    for _ in range(levels):
        level = []
        for path in opened:
            sure = np.exp(np.float32(children_of(path)[0])) > np.asarray(thresholds, dtype=np.float32)
            level += [(*path, rank) for rank in range(widths[int(sure.sum())])]
        found += level
        opened = sorted(level, key=lambda path: -score_of(path, children_of))[:width] if width > 1 else level[:1]
    return found


def best(candidates: Sequence[Path], children_of: Children, nodes: int) -> list[Path]:
    """The likeliest `nodes` - 1 candidates in their order, of equals the earlier ones."""
    kept = sorted(candidates, key=lambda path: -score_of(path, children_of))[: nodes - 1]
    return [path for path in candidates if path in kept]
