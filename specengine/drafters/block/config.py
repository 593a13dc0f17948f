"""The options of the drafters dflash, jetspec, dspark and domino."""

from __future__ import annotations

from dataclasses import dataclass

from specengine._C import MAX_NODES
from specengine.utils.spec_string import check_range

TREES = ("", "chain", "jetspec", "top2gap", "ddtree")
MOST_CHILDREN = 128


@dataclass(frozen=True)
class BlockConfig:
    """The options.

    tree: how it is built. `chain`: the likeliest token of every level. `jetspec`: JetSpec's tree. `top2gap`: the same
    with fewer children where the likeliest token is far ahead. `ddtree`: the likeliest prefixes. Empty: the same of at
    most top_k children per node; of a head that reads the drafted path, level by level.
    nodes: of the largest tree, root included.  top_k: most children per node; tree=ddtree has no limit.
    beam: nodes expanded per level by a head that reads the drafted path.
    beta: of top2gap, how fast the children become fewer.
    threshold: of a drafter with a confidence head, a chain ends before the first token of less confidence.
    adaptive: keep the nodes that pay, otherwise the whole tree.  dtype: of the drafter's weights, as the engine's.
    sample: draw the children from the drafter's distribution, for rules that read it.
    """

    tree: str = ""
    nodes: int = 64
    top_k: int = 7
    beam: int = 2
    beta: float = 1.0
    threshold: float = 0.0
    adaptive: bool = True
    dtype: str = "auto"
    sample: bool = False

    def __post_init__(self) -> None:
        if self.tree not in TREES:
            raise ValueError(f"tree: expected one of {', '.join(filter(None, TREES))} or nothing, got {self.tree!r}")
        check_range("nodes", self.nodes, 2, MAX_NODES)
        check_range("top_k", self.top_k, 1, MOST_CHILDREN)
        check_range("beam", self.beam, 1, self.top_k)
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"beta: expected a positive number, got {self.beta}")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold: expected a probability, got {self.threshold}")
        if self.threshold and self.tree != "chain":
            raise ValueError(f"threshold: expected tree=chain beside it, got tree={self.tree!r}")
