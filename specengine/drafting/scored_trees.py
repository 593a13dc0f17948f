"""Trees whose nodes come with the drafter's own probabilities, cut to the nodes that pay."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from specengine.drafting.acceptance_watch import AcceptanceWatch
from specengine.drafting.cost_model import CostModel
from specengine.drafting.tree_choice import CYCLE_SECONDS, DRAFT_SECONDS, Acceptance, choose_nodes
from specengine.tree import DraftTree

# Drafters are surer of themselves than they should be, or less: how often a node is accepted is learned by classes of
# what its drafter gave it. Class i reaches from EDGES[i - 1] to EDGES[i].
EDGES = (0.01, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
LONGEST_PAUSE = 15  # cycles: a drafter that does not pay costs a sixteenth of what it takes
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))


@dataclass(frozen=True)
class ScoredTree:
    """A tree as DraftTree has it. chances: the drafter's probability of each node, once its parent is accepted."""

    tokens: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float]

    def rooted(self, token: int, levels: int) -> ScoredTree:
        """The same below another root, as far as `levels` go; nodes lie in order of their depth, -1 behind the last."""
        depths, kept = [0], 1
        for parent in self.parents[1:]:
            if parent < 0 or depths[parent] == levels:
                break
            depths.append(depths[parent] + 1)
            kept += 1
        return ScoredTree([token, *self.tokens[1:kept]], self.parents[:kept], self.chances[:kept])


@dataclass(frozen=True)
class Drafted:
    """A tree that was handed over, the whole one it is a part of, and the class of each of that one's chances."""

    tree: DraftTree
    whole: ScoredTree
    classes: list[int]


class TreeCutter:
    """Keeps as many of the likeliest nodes as pay, by the chances that turned out to be true so far.

    costs: of a target pass; None: every tree stays as it is.  drafter: whose trees they are, for a warning.
    Where even the best trees did not pay for their drafting of late, `pauses` says so for more and more cycles.
    """

    def __init__(self, costs: CostModel | None, drafter: str = "the drafter") -> None:
        self._costs, self._watch = costs, AcceptanceWatch(drafter)
        self._acceptance = Acceptance(MIDDLES, weight=20, memory=1000)
        self._saved: float | None = None  # seconds of a cycle, of late
        self._pause = self._left = 0  # cycles

    def pauses(self) -> bool:
        """Whether nothing should be drafted in this cycle; to be asked once a cycle."""
        self._left -= 1
        return self._left >= 0

    def cut(self, trees: Sequence[ScoredTree], prefix: float, seconds: float = 0.0) -> list[Drafted]:
        """One tree per sequence of a batch.  prefix: tokens in the cache, the mean of the batch.
        seconds: that drafting them took."""
        classes = [[bisect_right(EDGES, chance) for chance in tree.chances] for tree in trees]
        if self._costs is None:
            return [Drafted(DraftTree(t.tokens, t.parents), t, own) for t, own in zip(trees, classes, strict=True)]
        rates = self._acceptance.rates()
        orders, falling = [], []
        for tree, own in zip(trees, classes, strict=True):
            reach = [1.0] * len(tree.tokens)
            for node in range(1, len(reach)):
                reach[node] = reach[tree.parents[node]] * rates[own[node]]
            order = sorted(range(1, len(reach)), key=lambda node: -reach[node])  # stable: no node before its parent
            orders.append(order), falling.append([reach[node] for node in order])
        counts = choose_nodes(falling, self._costs, prefix)
        if any(falling):
            expected = sum(1 + sum(chances[:count]) for chances, count in zip(falling, counts, strict=True))
            self._weigh(len(trees), sum(counts), expected, prefix, seconds)
        return [
            Drafted(_part(tree, sorted(order[:count])), tree, own)
            for tree, own, order, count in zip(trees, classes, orders, counts, strict=True)
        ]

    def _weigh(self, sequences: int, nodes: int, expected: float, prefix: float, seconds: float) -> None:
        """Compares a cycle with what its expected tokens would take one pass after the other."""
        alone = self._costs(sequences, prefix) + CYCLE_SECONDS
        drafted = self._costs(sequences + nodes, prefix) + CYCLE_SECONDS + (DRAFT_SECONDS if nodes else 0) + seconds
        saved = alone * expected / sequences - drafted
        self._saved = saved if self._saved is None else self._saved + (saved - self._saved) / 4
        self._pause = min(LONGEST_PAUSE, 2 * self._pause + 1) if self._saved < 0 else 0
        self._left = self._pause

    def learned(self, chance: float) -> float:
        """What a drafter's probability turned out to mean so far."""
        return self._acceptance.rates()[bisect_right(EDGES, chance)]

    def observe(self, drafted: Drafted, committed: Sequence[int]) -> None:
        """Learns from what the text is: committed holds the accepted tokens and the one after them.

        Nodes that were cut off count too: what was once found not to pay could not be found out to pay after all.
        """
        tree, reached = drafted.whole, {0: 0}  # nodes on the committed path, and how many tokens lead to them
        for node in range(1, len(tree.tokens)):
            depth = reached.get(tree.parents[node])
            if depth is None or depth == len(committed):
                continue
            accepted = tree.tokens[node] == committed[depth]
            self._acceptance.observe(drafted.classes[node], accepted)
            if accepted:
                reached[node] = depth + 1
        if len(tree.tokens) > 1 and committed:
            self._watch.observe(len(reached) > 1)


def _part(tree: ScoredTree, kept: Sequence[int]) -> DraftTree:
    """The root and the kept nodes, which are in order and hold every node's parent."""
    nodes = [0, *kept]
    place = {node: i for i, node in enumerate(nodes)}
    return DraftTree([tree.tokens[node] for node in nodes], [-1, *(place[tree.parents[node]] for node in kept)])
