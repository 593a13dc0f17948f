"""Trees of slots: one pass gives the distributions of all levels, so all nodes of a level have the same children."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.draft_trees.best_first import ddtree, jetspec_tree
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters.backbone_expanders import BackboneExpanders
from specengine.drafters.distributions.growth import Growth
from specengine.drafters.distributions.level_logits import LevelLogits
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.one_pass.config import OnePassConfig
from specengine.ops.row_tools import take_rows


class SlotTrees:
    """Makes the trees that the options ask for.

    columns: of the logits.  tokens: int32 [columns], the target's token of each; None: they are the same.
    """

    def __init__(self, config: OnePassConfig, columns: int, tokens: torch.Tensor | None) -> None:
        self.ranks = min(config.ranks, columns)
        self._nodes, self._tokens = config.most_nodes, tokens
        self._expanders = BackboneExpanders([self.ranks])
        self._grow = jetspec_tree if config.tree == "jetspec" else ddtree  # of one child per node both are chains

    def __call__(self, requests: Sequence[DraftRequest], logits: torch.Tensor) -> list[ScoredTree]:
        """Returns a tree per request, no deeper than its limit. logits: float32 [B, levels, columns]."""
        shape = (*logits.shape[:2], self.ranks)
        best = self._expanders(logits.view(-1, 1, logits.shape[2]))  # every distribution is a tree of one level
        tokens = best.tokens[:, 1:] if self._tokens is None else self._tokens[best.tokens[:, 1:].long()]
        columns = tokens.reshape(shape).tolist(), best.scores[:, 1:].reshape(shape).tolist()
        return [self._tree(request, *own) for request, *own in zip(requests, *columns, strict=True)]

    def _tree(
        self, request: DraftRequest, tokens: Sequence[Sequence[int]], log_probs: Sequence[Sequence[float]]
    ) -> ScoredTree:
        levels = min(request.draft_limit, len(tokens))
        children = list(zip(tokens, log_probs, strict=True))
        return self._grow(request.tokens[-1], lambda _, __, depth, ___: children[depth], self._nodes, levels)


def slot_logits(trees: Sequence[Growth], logits: torch.Tensor) -> LevelLogits:
    """Returns the logits of open nodes, level by level. logits: float32 [B, levels, columns], of those trees."""
    slots, levels = [tree.slot for tree in trees], logits.shape[1]
    rows = logits.flatten(0, 1)

    def level_logits(growing: Sequence[Growth], level: int) -> torch.Tensor:
        return take_rows(rows, [slots.index(tree.slot) * levels + level for tree in growing for _ in tree.open])

    return level_logits
