"""The options of the drafter suffix."""

from __future__ import annotations

from dataclasses import dataclass

from specengine._C import DEEPEST, MAX_NODES
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Config:
    """The options.

    nodes: largest tree, root included.  length: longest continuation drafted.  branches: of a node, at most.
    corpus: search the corpus that comes with the package, where none is given.
    remember: search answers to earlier requests, too: their last so many tokens (up to twice as many).
    adaptive: draft as many nodes as pay, otherwise the largest tree. Any choice is lossless under the rule `match`.
    """

    nodes: int = 16
    length: int = 15
    branches: int = 4
    corpus: bool = True
    remember: int = 0
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)
        check_range("length", self.length, 1, DEEPEST)
        check_range("branches", self.branches, 1, MAX_NODES - 1)
        check_range("remember", self.remember, 0, 1 << 22)
