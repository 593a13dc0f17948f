"""Random models over a few tokens, and every tree that can be drafted from them with its probability.

A shape says how many children each node asks for: a tuple with a shape per child. Paths are tuples of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

Shape = tuple["Shape", ...]
Path = tuple[int, ...]
Conditional = Callable[[Path], np.ndarray]

CHAINS: dict[int, Shape] = {1: ((),), 2: (((),),), 3: ((((),),),)}
TREES: dict[str, Shape] = {
    "siblings": ((), (), ()),
    "two levels": (((), ()), ((),)),
    "three levels": ((((),),), ((), ())),
    "backbone": (((), ()), ()),  # as trained drafters draw it
}


@dataclass(frozen=True)
class Models:
    """Target and draft distributions [V] behind every path, random and different everywhere.

    zeros: whether both give no probability to one token of every row, as filters do.
    """

    vocab: int
    seed: int
    zeros: bool = False

    def target(self, path: Path) -> np.ndarray:
        return self._row(path, 0)

    def draft(self, path: Path) -> np.ndarray:
        return self._row(path, 1)

    def _row(self, path: Path, which: int) -> np.ndarray:
        return _random_row(self.vocab, self.zeros, (self.seed, which, *(token + 1 for token in path)))


@dataclass(frozen=True)
class Masked(Models):
    """Models under masks that allow some tokens behind every path, one of them likely; `least` where they can.

    The draft distribution has no entry where its mask leaves no probability.
    """

    least: int = 1

    def allowed(self, path: Path) -> np.ndarray:
        rng = np.random.default_rng((self.seed, 2, *(token + 1 for token in path)))
        allowed = rng.permutation(self.vocab) < rng.integers(self.least, self.vocab, endpoint=True)
        allowed[super().target(path).argmax()] = True
        return allowed

    def target(self, path: Path) -> np.ndarray:
        return self._left(super().target(path), path)

    def draft(self, path: Path) -> np.ndarray:
        return self._left(super().draft(path), path)

    def unmasked_draft(self, path: Path) -> np.ndarray:
        """Returns the distribution that the drafter samples from, which knows no masks."""
        return super().draft(path)

    def _left(self, row: np.ndarray, path: Path) -> np.ndarray:
        left = row * self.allowed(path)
        return left / left.sum() if left.sum() > 0 else np.empty(0)


@cache
def _random_row(vocab: int, zeros: bool, key: Path) -> np.ndarray:
    rng = np.random.default_rng(key)
    row = np.exp(1.5 * rng.normal(size=vocab))
    if zeros:
        row[rng.integers(vocab)] = 0
    return row / row.sum()


@dataclass
class Drafted:
    """A tree and the probability that it is drafted; the root comes first, its token has no effect."""

    probability: float
    parents: list[int]
    tokens: list[int]
    paths: list[Path]
    asked: frozenset[int] = frozenset()  # nodes that have lost all their children to their masks

    def grafted(self, other: Drafted, chance: float) -> Drafted:
        """Attaches another tree, whose root is a node here: the child of the root."""
        at = len(self.parents)
        parents = [0, *(at + parent for parent in other.parents[1:])]
        return Drafted(
            self.probability * other.probability * chance,
            self.parents + parents,
            self.tokens + other.tokens,
            self.paths + other.paths,
        )

    @property
    def inner(self) -> set[int]:
        """The nodes whose children were drafted from a distribution."""
        return {*self.parents[1:], *self.asked}

    def cut(self, allowed: Callable[[Path], np.ndarray]) -> Drafted:
        """Leaves out the nodes that masks forbid, with all below them."""
        kept = [0]
        for node in range(1, len(self.parents)):
            above = self.parents[node]
            if above in kept and allowed(self.paths[above])[self.tokens[node]]:
                kept.append(node)
        parents = [-1, *(kept.index(self.parents[node]) for node in kept[1:])]
        asked = frozenset(i for i, node in enumerate(kept) if node in self.inner)
        return Drafted(self.probability, parents, [self.tokens[i] for i in kept], [self.paths[i] for i in kept], asked)


def sampled(draft: Conditional, replacement: bool, shape: Shape, path: Path = ()) -> Iterator[Drafted]:
    """Lists all trees of a shape, siblings drawn from `draft` in turn; fewer where `draft` has no further token."""
    yield from _with_children(Drafted(1.0, [-1], [(0, *path)[-1]], [path]), shape, draft(path), draft, replacement)


def _with_children(tree, shape, row, draft, replacement) -> Iterator[Drafted]:
    if not shape or row.sum() == 0:
        yield tree
        return
    for token, chance in enumerate(row / row.sum()):
        if chance == 0:
            continue
        left = row if replacement else np.where(np.arange(len(row)) == token, 0, row)
        for below in sampled(draft, replacement, shape[0], (*tree.paths[0], token)):
            yield from _with_children(tree.grafted(below, chance), shape[1:], left, draft, replacement)


def deterministic(favourites: Conditional, shape: Shape, path: Path = ()) -> Drafted:
    """Makes the tree whose children are the most likely tokens; a third sibling repeats the first."""
    order = np.argsort(-favourites(path))[:2]
    tree = Drafted(1.0, [-1], [(0, *path)[-1]], [path])
    for i, below in enumerate(shape):
        tree = tree.grafted(deterministic(favourites, below, (*path, int(order[i % 2]))), 1.0)
    return tree
