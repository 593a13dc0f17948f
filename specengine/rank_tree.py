"""Trees known before anything is drafted, given as rank paths: [0, 2] is the third likeliest child of the likeliest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specengine._C import MAX_NODES
from specengine.scored_trees import ScoredTree

# One path per word, a digit per level; best first, as they were found.
PUBLISHED = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 "
        "0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    )
}


@dataclass(frozen=True)
class RankTree:
    """Nodes beside the root, parents first. parents: int [N], 0 for the root, i + 1 for node i.
    depths: int [N] from 1.  ranks: int [N], among the likeliest tokens of the parent's distribution."""

    parents: np.ndarray
    depths: np.ndarray
    ranks: np.ndarray

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> RankTree:
        """Raises ValueError for paths that are no tree, or whose parents do not come first."""
        numbers: dict[tuple[int, ...], int] = {(): 0}
        for path in paths:
            if not isinstance(path, (list, tuple)) or any(type(rank) is not int or rank < 0 for rank in path):
                raise ValueError(f"tree: expected lists of ranks from 0, got {path!r}")
            path = tuple(path)
            if path in numbers or path[:-1] not in numbers:
                raise ValueError(f"tree: path {list(path)} is there twice, or comes before its parent")
            numbers[path] = len(numbers)
        if not 2 <= len(numbers) <= MAX_NODES:
            raise ValueError(f"tree: expected 1 to {MAX_NODES - 1} paths, got {len(numbers) - 1}")
        own = [path for path in numbers if path]
        columns = ([numbers[path[:-1]] for path in own], [len(path) for path in own], [path[-1] for path in own])
        return RankTree(*(np.array(column) for column in columns))

    @staticmethod
    def named(name: str) -> RankTree:
        """A published tree, or that of a JSON file with a list of paths. Raises ValueError, FileNotFoundError."""
        if name in PUBLISHED:
            return RankTree.of([[int(digit) for digit in word] for word in PUBLISHED[name].split()])
        if not name.endswith(".json"):
            raise ValueError(f"tree: expected {', '.join(PUBLISHED)} or a .json file, got {name!r}")
        try:
            return RankTree.of(list(json.loads(Path(name).read_text(encoding="utf-8"))))
        except (json.JSONDecodeError, TypeError, UnicodeDecodeError):
            raise ValueError(f"tree: {name} is no JSON list of rank paths") from None

    def __len__(self) -> int:
        return len(self.ranks)

    def first(self, nodes: int, levels: int) -> RankTree:
        """Its first nodes that lie in the first levels."""
        kept = np.flatnonzero(self.depths <= levels)[:nodes]
        number = np.zeros(len(self) + 1, dtype=int)
        number[kept + 1] = np.arange(1, len(kept) + 1)
        return RankTree(number[self.parents[kept]], self.depths[kept], self.ranks[kept])

    def scored(self, root: int, tokens: np.ndarray, chances: np.ndarray, levels: int) -> ScoredTree:
        """The first levels of the tree of one sequence.

        tokens, chances: [levels, ranks], of each level's distribution, which knows nothing of the path above it.
        """
        part = self.first(len(self), levels)
        place = (part.depths - 1, part.ranks)
        return ScoredTree(
            [root, *tokens[place].tolist()], [-1, *part.parents.tolist()], [1.0, *chances[place].tolist()]
        )
