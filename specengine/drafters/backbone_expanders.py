"""Trees with a backbone, from the logits of all levels of a batch: how fasteagle, medusa, glide and eagle expand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters.engine_views import DraftRequest
from specengine.ops.expand_backbone import BackboneExpander, BackboneTrees


class BackboneExpanders:
    """Expands logits of any shape; makes an expander for each shape once, since captured graphs hold on to its buffers.

    widths, thresholds: of every level; see expand_backbone.
    """

    def __init__(self, widths: Sequence[int], thresholds: Sequence[float] = ()) -> None:
        self._widths = widths
        self._thresholds = thresholds
        self._made: dict[tuple[int, int], tuple[BackboneExpander, torch.Tensor]] = {}  # and roots, by B and T

    def __call__(
        self, logits: torch.Tensor, roots: torch.Tensor | None = None, token_ids: torch.Tensor | None = None
    ) -> BackboneTrees:
        """Returns trees of logits float32 [B, T, Vd]; the next call with the same B and T overwrites them.

        roots: int32 [B]; None: the caller sets them.  token_ids: int32 [Vd], the target's tokens; None: trees have the
        drafter's.
        """
        batch, levels, vocab = logits.shape
        key = (batch, levels)
        if key not in self._made:
            expander = BackboneExpander(batch, levels, vocab, self._widths, self._thresholds, logits.device)
            self._made[key] = expander, torch.zeros(batch, dtype=torch.int32, device=logits.device)
        expander, unset = self._made[key]
        return expander(logits, unset if roots is None else roots, token_ids)


def scored_trees(
    trees: BackboneTrees, requests: Sequence[DraftRequest], target_ids: Callable[[torch.Tensor], torch.Tensor]
) -> list[ScoredTree]:
    """Returns the trees of requests, below their roots and within their limits, with the drafter's own chances.

    target_ids: turns the drafter's tokens into the target's.
    """
    before = trees.scores.gather(1, trees.parents.clamp(min=0).long())
    tokens = target_ids(trees.tokens).tolist()
    parents = trees.parents.tolist()
    chances = (trees.scores - before).exp_().tolist()
    return [
        ScoredTree(*columns).rooted(request.tokens[-1], request.draft_limit)
        for request, *columns in zip(requests, tokens, parents, chances, strict=True)
    ]
