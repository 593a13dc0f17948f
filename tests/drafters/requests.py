"""Requests and paths of drafts, made by hand."""

from specengine import SamplingParams
from specengine.draft_trees.tree import DraftTree
from specengine.engine.request import Request
from specengine.rules.base import Wants

GREEDY = SamplingParams(max_new_tokens=24)


def sequence_of(tokens, limit=100, params=GREEDY) -> Request:
    return Request(list(tokens), params, params.seed, limit, frozenset(), None)


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Drafted tokens from the root's child to a node."""
    path = []
    while node:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def with_logits(drafter, requests, sampled):
    """The trees that a drafter drafts with their distributions, and these."""
    draft = drafter.draft_for(Wants.SAMPLED_ONLY if sampled else Wants.PROBABILITIES, requests)
    return draft.trees, draft.logits
