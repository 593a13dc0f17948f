"""Trees given as rank paths before anything is drafted: [0, 2] is the third likeliest child of the likeliest child."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specengine._C import MAX_NODES

# One path per word, a digit per level; best first, as they were found.
PUBLISHED = {
    "mc_sim_7b_63": (
        "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 "
        "0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
    ),
    # EAGLE-1's; its own code also calls it mc_sim_7b_63
    "eagle_25": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
}


@dataclass(frozen=True)
class RankTree:
    """The nodes of a tree, root excluded, parents first.

    parents: int [N], 0 for the root, i + 1 for node i.  depths: int [N] from 1.
    ranks: int [N], among the likeliest tokens of the parent's distribution.
    """

    parents: np.ndarray
    depths: np.ndarray
    ranks: np.ndarray

    @staticmethod
    def of(paths: Sequence[Sequence[int]]) -> RankTree:
        """Returns the tree of some paths. Raises ValueError where they are no tree, parents first."""
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
        return RankTree(
            parents=np.array([numbers[path[:-1]] for path in own]),
            depths=np.array([len(path) for path in own]),
            ranks=np.array([path[-1] for path in own]),
        )

    @staticmethod
    def named(name: str) -> RankTree:
        """Returns a published tree, or the tree of a JSON file with a list of paths.

        Raises ValueError and FileNotFoundError.
        """
        if name in PUBLISHED:
            return RankTree.of([[int(digit) for digit in word] for word in PUBLISHED[name].split()])
        if not name.endswith(".json"):
            raise ValueError(f"tree: expected {', '.join(PUBLISHED)} or a .json file, got {name!r}")
        try:
            return RankTree.of(list(json.loads(Path(name).read_text(encoding="utf-8"))))
        except FileNotFoundError:
            raise FileNotFoundError(f"tree: there is no file {name}") from None
        except (json.JSONDecodeError, TypeError, UnicodeDecodeError, RecursionError, IsADirectoryError):
            raise ValueError(f"tree: {name} is no JSON list of rank paths") from None

    @staticmethod
    def of_widths(widths: Sequence[int]) -> RankTree:
        """Returns the tree whose nodes of level i have widths[i] children each."""
        level: list[tuple[int, ...]] = [()]
        paths: list[tuple[int, ...]] = []
        for width in widths:
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return RankTree.of(paths)

    def __len__(self) -> int:
        return len(self.ranks)

    def without_gaps(self) -> RankTree:
        """Returns the same tree for drawn children: siblings are numbered in the order of their ranks."""
        pairs = zip(self.parents, self.ranks, strict=True)
        ranks = [int((self.ranks[self.parents == parent] < rank).sum()) for parent, rank in pairs]
        return RankTree(self.parents, self.depths, np.array(ranks))

    def first(self, nodes: int, levels: int) -> RankTree:
        """Returns the first nodes that lie in the first levels, in order of their level."""
        kept = np.flatnonzero(self.depths <= levels)[:nodes]
        kept = kept[np.argsort(self.depths[kept], kind="stable")]
        number = np.zeros(len(self) + 1, dtype=int)
        number[kept + 1] = np.arange(1, len(kept) + 1)
        return RankTree(number[self.parents[kept]], self.depths[kept], self.ranks[kept])
