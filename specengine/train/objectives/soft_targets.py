"""The target's distributions at the positions to learn: computed once, compared with every level of a drafter."""

from __future__ import annotations

import torch
from torch.nn import functional

from specengine.train.objectives.head_loss import soft_cross_entropy
from specengine.train.objectives.level_report import LevelReport
from specengine.train.objectives.target_weights import TargetWeights
from specengine.train.objectives.training_batch import TrainingBatch, ahead


class SoftTargets:
    """The wanted positions whose next token is in the drafter's vocabulary, and their truth.

    The truth is the target's softmax over the drafter's vocabulary; with `hard` it is the token of the text.
    dialogue, position: int64 [R], the place of each position in the batch.
    """

    @torch.no_grad()
    def __init__(self, batch: TrainingBatch, target: TargetWeights, *, hard: bool = False) -> None:
        self._batch = batch
        self._target = target
        self._hard = hard
        wanted_ids = target.draft_ids(ahead(batch.tokens, 1) if hard else batch.greedy)
        learnt = batch.wanted & (wanted_ids >= 0)
        self.dialogue, self.position = learnt.nonzero(as_tuple=True)
        # class indices, or a distribution per row
        self._truth = wanted_ids[learnt] if hard else target.logits(batch.last[learnt]).float().softmax(-1)

    def first_row(self, levels: int) -> int:
        """Finds the first row of the batch with a guess to learn at one of `levels` levels."""
        return max(0, int(self.position.min()) - levels) if len(self.position) else 0

    def rows(self, level: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns dialogue and row of every learned guess of a level, and its index in `position`."""
        kept = (self.position >= level).nonzero()[:, 0]
        return self.dialogue[kept], self.position[kept] - level, kept

    def compare(
        self, level: int, states: torch.Tensor, head: torch.Tensor, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums the cross-entropy of a level; also returns its best guesses int64 [B, T, k], -1 at rows without loss.

        states: [B, T - first, C] of the rows from `first` on.  head: [V', C].
        """
        dialogue, row, kept = self.rows(level)
        ours = states[dialogue, row - first]
        truth = self._truth if len(kept) == len(self._truth) else self._truth[kept]
        best = 1 if torch.is_grad_enabled() else min(LevelReport.NEAR, len(head))
        if self._hard:
            logits = functional.linear(ours, head).float()
            loss = functional.cross_entropy(logits, truth, reduction="sum")
            ranked = logits.topk(best).indices
        else:
            everywhere = ours.new_ones(len(ours), dtype=torch.bool)
            loss, ranked = soft_cross_entropy(ours, head, truth, everywhere, best)
        guesses = self._batch.tokens.new_full((*self._batch.tokens.shape, best), -1)
        guesses[dialogue, row] = self._target.target_ids(ranked)
        return loss, guesses

    def report(self, loss: torch.Tensor, guesses: torch.Tensor, levels: int) -> LevelReport:
        """Reports a drafter that drafts token by token.

        Its guess i of row t is the guess of row t + i: as long as its guesses are right, it has read the same tokens
        there as in a cycle. loss, guesses: as returned by compare(0, ..).
        """
        return LevelReport.of([loss] * levels, [ahead(guesses, i) for i in range(1, levels + 1)], self._batch)
