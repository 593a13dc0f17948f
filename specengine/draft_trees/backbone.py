"""A backbone with leaves, from the best tokens of each level."""

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
    """The nodes of at most so many levels that are reached most often, `most` beside the root, none less than `least`.

    tokens, scores: per level, likeliest first, log-probabilities given the likeliest token of the level above.
    """
    tokens, scores = tokens[:levels], scores[:levels]
    width = len(tokens[0]) if tokens else 0
    parents = [max(0, 1 + (level - 1) * width) for level in range(len(tokens)) for _ in range(width)]
    whole = ScoredTree([root, *chain(*tokens)], [-1, *parents], [1.0, *(exp(score) for score in chain(*scores))])
    above = accumulate((level[0] for level in scores), initial=0.0)
    reached = [exp(before + score) for before, level in zip(above, scores, strict=False) for score in level]
    best = [node for node, chance in enumerate(reached) if chance >= least]
    if len(best) > most:
        best = sorted(best, key=lambda node: -reached[node])[:most]  # no node before its parent
    return whole if len(best) == len(parents) else whole.part(sorted(1 + node for node in best))
