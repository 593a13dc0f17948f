"""What the target says at the positions to learn: computed once, compared with every level of a drafter."""

from __future__ import annotations

import torch
from torch.nn import functional

from specengine.train.objectives.base import Frozen, LevelReport, TrainingBatch, ahead
from specengine.train.objectives.head_loss import soft_cross_entropy


class SoftTargets:
    """The wanted positions whose next token the drafter can say; the others teach nothing.

    The target's own softmax there, restricted to the drafter's vocabulary, where its best token is in that; with `hard`
    the token that was written, where that is.  sequence, position: int64 [R].
    """

    @torch.no_grad()
    def __init__(self, batch: TrainingBatch, frozen: Frozen, *, hard: bool = False) -> None:
        self._batch, self._frozen, self._hard = batch, frozen, hard
        said = frozen.draft_ids(ahead(batch.tokens, 1) if hard else batch.greedy)
        learnt = batch.wanted & (said >= 0)
        self.sequence, self.position = learnt.nonzero(as_tuple=True)
        # class indices, or a distribution per row: cross_entropy takes both
        self._truth = said[learnt] if hard else frozen.logits(batch.last[learnt]).float().softmax(-1)

    def first_row(self, levels: int) -> int:
        """The first row of the batch with a guess to learn at one of so many levels."""
        return max(0, int(self.position.min()) - levels) if len(self.position) else 0

    def rows(self, level: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sequence and row of every guess of a level that is learned, and its position in `position`."""
        kept = (self.position >= level).nonzero()[:, 0]
        return self.sequence[kept], self.position[kept] - level, kept

    def compare(
        self, level: int, states: torch.Tensor, head: torch.Tensor, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy of a level, summed, and its best guesses int64 [B, T, k] (-1 where nothing is learned).

        states: [B, T - first, C] of the rows from `first` on.  head: [V', C].
        """
        sequence, row, kept = self.rows(level)
        ours = states[sequence, row - first]
        truth = self._truth if len(kept) == len(self._truth) else self._truth[kept]
        best = 1 if torch.is_grad_enabled() else min(LevelReport.NEAR, len(head))
        if self._hard:
            logits = functional.linear(ours, head).float()
            loss, ranked = functional.cross_entropy(logits, truth, reduction="sum"), logits.topk(best).indices
        else:
            loss, ranked = soft_cross_entropy(ours, head, truth, ours.new_ones(len(ours), dtype=torch.bool), best)
        guesses = self._batch.tokens.new_full((*self._batch.tokens.shape, best), -1)
        guesses[sequence, row] = self._frozen.target_ids(ranked)
        return loss, guesses

    def report(self, loss: torch.Tensor, guesses: torch.Tensor, levels: int) -> LevelReport:
        """Of a drafter that goes on token by token: its guess i of row t is the one it makes at row t + i, where it has
        read the same tokens as in a cycle as long as its guesses are right.

        loss, guesses: of the rows themselves, compare(0, ..).
        """
        return LevelReport.of([loss] * levels, [ahead(guesses, i) for i in range(1, levels + 1)], self._batch)
