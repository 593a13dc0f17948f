"""A backbone with leaves: the likeliest token of each level has children, its siblings have none."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from math import exp

from specengine.draft_trees.scored_tree import ScoredTree


def backbone_tree(
    root: int,
    tokens: Sequence[Sequence[int]],
    scores: Sequence[Sequence[float]],
    levels: int,
    most: int,
    least: float = 0.0,
) -> ScoredTree:
    """Returns the nodes of the first `levels` levels that are reached most often.

    tokens, scores: per level, likeliest first; scores are log-probabilities given the likeliest token of the level
    above.  most: nodes, root excluded.  least: nodes that are reached with less probability are left out.
    """
    tokens = tokens[:levels]
    scores = scores[:levels]
    width = len(tokens[0]) if tokens else 0
    parents = [max(0, 1 + (level - 1) * width) for level in range(len(tokens)) for _ in range(width)]
    whole = ScoredTree([root, *chain(*tokens)], [-1, *parents], [1.0, *(exp(score) for score in chain(*scores))])
    above = accumulate((level[0] for level in scores), initial=0.0)
    reached = [exp(before + score) for before, level in zip(above, scores, strict=False) for score in level]
    best = [node for node, chance in enumerate(reached) if chance >= least]
    if len(best) > most:
        best = sorted(best, key=lambda node: -reached[node])[:most]  # no node before its parent
    return whole if len(best) == len(parents) else whole.part(sorted(1 + node for node in best))
