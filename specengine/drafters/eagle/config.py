"""The options of the drafters eagle, eagle3 and mtp."""

from __future__ import annotations

from dataclasses import dataclass

from specengine._C import MAX_NODES
from specengine.utils.spec_string import check_range

MAX_CANDIDATES = 2048  # of select_nodes


@dataclass(frozen=True)
class EagleConfig:
    """The options.

    nodes: of the largest tree, root included.  levels: of the tree (the published code's depth and one).
    top_k: children per node.
    beam: nodes expanded per level; 1: the likeliest one. With 1 its siblings are leaves, and a draft costs what a
    chain's costs. 0: top_k of them, as EAGLE-2 has it, but one where the tree is adaptive and drafted on the CPU.
    adaptive: keep the nodes that pay, otherwise the largest tree.
    tree: one given as rank paths instead, a published one (eagle_25 is EAGLE-1's) or a .json file with a list of them.
    dtype: of the drafter's weights, as the engine's.
    sample: draw the children from the drafter's distribution, for rules that read it.
    """

    nodes: int = 60
    levels: int = 8
    top_k: int = 10
    beam: int = 0
    tree: str = ""
    adaptive: bool = True
    dtype: str = "auto"
    sample: bool = False

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)
        check_range("levels", self.levels, 1, MAX_NODES - 1)
        check_range("top_k", self.top_k, 1, MAX_NODES - 1)
        check_range("beam", self.beam, 0, self.top_k)
        if 1 + self.candidates > MAX_CANDIDATES:
            raise ValueError(
                f"levels: {self.levels} of them with top_k={self.top_k} are {self.candidates} candidates, at most "
                f"{MAX_CANDIDATES - 1} are possible"
            )
        if self.expanded > MAX_NODES:
            raise ValueError(
                f"levels: {self.levels} of them with top_k={self.top_k} are {self.expanded} rows to attend to, "
                f"at most {MAX_NODES} are possible"
            )

    @property
    def candidates(self) -> int:
        """Nodes that the tree is chosen from."""
        return self.top_k + (self.levels - 1) * self.width * self.top_k

    @property
    def expanded(self) -> int:
        """Nodes whose children are drafted, root included."""
        return 1 + (self.levels - 1) * self.width

    @property
    def width(self) -> int:
        """Nodes expanded per level."""
        return self.beam or self.top_k

    @property
    def drawn(self) -> tuple[int, int]:
        """Levels, and nodes of a level, of a tree whose distributions a rule reads; the first node has children."""
        levels = min(self.levels, self.nodes - 1)
        return levels, min(self.top_k, (self.nodes - 1) // levels)
