"""Trees that grow node by node, each request alone: DDTree's and JetSpec's, of a head's children."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp

import torch

from specengine.draft_trees.best_first import Expand, ddtree, jetspec_tree
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters.block.config import BlockConfig
from specengine.drafters.block.head import Children, OpenDraft

GAP = 1.0  # log-probability by which JetSpec's top2gap expects the likeliest token to be ahead

Listed = tuple[Sequence[int], Sequence[float]]


def path_trees(
    config: BlockConfig, draft: OpenDraft, roots: torch.Tensor, limits: Sequence[int], reads_path: bool
) -> list[ScoredTree]:
    """Returns the tree that the options ask for below each root, int32 [B]. limits: levels of each."""
    build = jetspec_tree if config.tree in ("jetspec", "top2gap") else ddtree
    levels = [] if reads_path else level_children(draft, roots, max(limits))
    trees = []
    for number, (root, limit) in enumerate(zip(roots.tolist(), limits, strict=True)):
        paths = _Paths(draft, number, roots.device)
        expand = paths if reads_path else _of_levels([own[number] for own in levels])
        if config.tree == "top2gap":
            expand = _narrowed(expand, config.beta)
        tree = build(root, expand, config.nodes, limit)
        trees.append(paths.with_confidence(tree) if reads_path else tree)
    return trees


def level_children(draft: OpenDraft, roots: torch.Tensor, levels: int) -> list[list[Listed]]:
    """Returns the children of every level and request, of a head that reads no path."""
    owners = torch.arange(len(roots), device=roots.device)
    found = []
    for level in range(levels):
        children = draft.children(level, owners, roots, None)
        found.append(list(zip(children.tokens.tolist(), children.log_probs.tolist(), strict=True)))
    return found


class _Paths:
    """The children of every node of one request's tree, of a head that reads the path."""

    def __init__(self, draft: OpenDraft, owner: int, device: torch.device) -> None:
        self._draft, self._owner = draft, torch.tensor([owner], device=device)
        self._of: dict[int, Children] = {}  # by node

    def __call__(self, node: int, parent: int, depth: int, token: int) -> Listed:
        memory = self._of[parent].memory if parent >= 0 else None
        tokens = torch.tensor([token], dtype=torch.int32, device=self._owner.device)
        children = self._draft.children(depth, self._owner, tokens, memory)
        self._of[node] = children
        return children.tokens[0].tolist(), children.log_probs[0].tolist()

    def with_confidence(self, tree: ScoredTree) -> ScoredTree:
        """Returns the tree with the chances that the head's confidence gives."""
        chances = [1.0]
        listed = {node: _chances(own) for node, own in self._of.items()}
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            chances.append(listed[parent][token])
        return replace(tree, chances=chances)


def _chances(children: Children) -> dict[int, float]:
    return dict(zip(children.tokens[0].tolist(), children.chances[0].tolist(), strict=True))


def _of_levels(levels: Sequence[Listed]) -> Expand:
    def expand(node: int, parent: int, depth: int, token: int) -> Listed:
        return levels[depth]

    return expand


def _narrowed(expand: Expand, beta: float) -> Expand:
    """Leaves a node fewer children the further the likeliest one is ahead of the second."""

    def narrowed(node: int, parent: int, depth: int, token: int) -> Listed:
        tokens, log_probs = expand(node, parent, depth, token)
        gap = log_probs[0] - log_probs[1] if len(log_probs) > 1 else float("inf")
        return fanned(tokens, gap, beta), fanned(log_probs, gap, beta)

    return narrowed


def fanned(children: Sequence, gap: float, beta: float) -> Sequence:
    """Returns the first children that JetSpec's top2gap keeps. gap: between the first two log-probabilities."""
    share = 1 / (1 + exp(min(beta * (gap - GAP), 700.0)))
    return children[: max(1, round(len(children) * share))]
