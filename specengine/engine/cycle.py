"""The loop of speculative decoding. Plain decoding is the tree that has its root alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.cache.kv_cache import KVCache
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.drafter import Drafter
from specengine.engine.cycle_batch import CycleBatch
from specengine.models.transformer import TargetOutput, Transformer
from specengine.ops.verify_tree import Accepted
from specengine.rules import Rule


@dataclass(frozen=True)
class Cycle:
    """Drafts, verifies, accepts, compacts and observes: every request of a batch commits at least one token."""

    target: Transformer
    cache: KVCache
    drafter: Drafter
    rule: Rule

    def run(self, batch: CycleBatch) -> None:
        """Runs one cycle of a batch; a device batch captures these same lines in a CUDA graph."""
        tree = batch.draft(self.drafter, self.rule)
        batch.mark("draft")
        output = self.verify(tree, batch)
        batch.mark("verify")
        accepted = self.accept(tree, output.scores, batch)
        batch.mark("accept")
        if tree.ancestors is not None and not self.drafter.drafts_chains and accepted.path.shape[1] > 1:
            self.cache.compact(batch.cache, accepted, self.target.ops)  # paths of chains and of roots lie in place
        batch.mark("compact")
        batch.commit(tree, accepted, output.scores)  # cuts paths; only states must not go on behind a request's end
        batch.mark("accept")
        self.cache.compact_states(batch.cache, tree.row_start, accepted, self.target.ops)
        batch.mark("compact")
        batch.observe(self.drafter, output.hidden_states)
        batch.mark("draft")  # all time of the drafter is one phase

    def verify(self, tree: TreeBatch, batch: CycleBatch) -> TargetOutput:
        """Runs one pass of the target; a greedy batch gets the likeliest allowed tokens instead of logits."""
        hidden_states = self.target.hidden_states(tree, self.cache, batch.cache)
        if batch.reads_forbidden:
            scores = self.target.logits(hidden_states.normed)
            batch.fill_masks(tree)
            return TargetOutput(scores, hidden_states)
        batch.fill_masks(tree)
        score = self.target.logits if batch.reads_logits else self.target.likeliest
        return TargetOutput(score(hidden_states.normed, batch.masks), hidden_states)

    def accept(self, tree: TreeBatch, scores: torch.Tensor, batch: CycleBatch) -> Accepted:
        """Walks every tree by the rule, to the last accepted node and the bonus token; negative where there is none."""
        masks = None if scores.dim() == 1 else batch.masks  # likeliest tokens obey them already
        place = (batch.params, batch.history, batch.workspace)
        return self.target.ops.verify_tree(scores, tree, *place, self.rule, batch.draft_logits, masks, raises=False)
