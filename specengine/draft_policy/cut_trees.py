"""Where a tree is cut to size, and by what: a node stays where its token is expected to save more than its row costs.

The sizes change the speed only: under the rule `match` every tree gives the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specengine.draft_policy.cost_model import CostModel
from specengine.draft_policy.cycle_time import cycle_seconds
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree


@dataclass(frozen=True)
class CutTrees:
    """The trees of a batch, cut to size.

    nodes: of all trees, roots excluded.  expected: tokens that the cycle is expected to commit, of all requests.
    """

    trees: list[DraftTree]
    nodes: int
    expected: float


def cut_trees(
    trees: Sequence[ScoredTree], costs: CostModel | None, prefix: float = 0.0, most: int | None = None
) -> CutTrees:
    """Cuts trees to as many of their likeliest nodes as pay.

    costs: of a target pass; None: every node pays.  prefix: tokens in the cache, the mean of the batch.
    most: nodes of a tree, root excluded.
    """
    if all(len(tree.tokens) == 1 for tree in trees):
        return CutTrees([DraftTree(tree.tokens, tree.parents) for tree in trees], 0, float(len(trees)))
    orders: list[list[int]] = []
    reaches: list[list[float]] = []
    for tree in trees:
        reach = [1.0] * len(tree.tokens)
        for node in range(1, len(reach)):
            reach[node] = reach[tree.parents[node]] * tree.chances[node]
        order = sorted(range(1, len(reach)), key=lambda node: -reach[node])[:most]  # no node before its parent
        orders.append(order)
        reaches.append([reach[node] for node in order])
    counts = [len(order) for order in orders] if costs is None else nodes_that_pay(reaches, costs, prefix)
    parts = [tree.part(sorted(order[:count])) for tree, order, count in zip(trees, orders, counts, strict=True)]
    return CutTrees(
        [DraftTree(part.tokens, part.parents) for part in parts],
        sum(counts),
        sum(1 + sum(reach[:count]) for reach, count in zip(reaches, counts, strict=True)),
    )


def nodes_that_pay(probabilities: Sequence[Sequence[float]], costs: CostModel, prefix: float = 0.0) -> list[int]:
    """Returns how many nodes, root excluded, each request should draft for the least expected time per token.

    probabilities: per request, that the target's text runs through each candidate node. They fall, so any number of
    first nodes is a tree.  prefix: tokens in the cache, the mean of the batch.

    The rows of all requests are one pass, so requests compete for rows. The mean over the requests is minimised. The
    time per token of all of them together would let a request that copies take rows for which all others wait.
    """
    requests = len(probabilities)
    gains: list[tuple[float, int]] = []  # of cycles per token, by each node, with the index of its request
    for owner, nodes in enumerate(probabilities):
        expected = 1.0
        for probability in nodes:
            gains.append((1 / expected - 1 / (expected + probability), owner))
            expected += probability
    gains.sort(key=lambda gain: -gain[0])  # equal gains stay in drafting order
    cycles = float(requests)
    taken = 0
    least = cycles * cycle_seconds(costs, requests, 0, prefix)
    for count, (gain, _) in enumerate(gains, start=1):
        cycles -= gain
        time = cycles * cycle_seconds(costs, requests, count, prefix)
        if time < least:  # the fewest of equals
            least, taken = time, count
    chosen = [0] * requests
    for _, owner in gains[:taken]:
        chosen[owner] += 1
    return chosen
