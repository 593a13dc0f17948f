"""What a pass shows of a drafter, level by level: losses, agreement and acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from specengine.train.objectives.training_batch import TrainingBatch, ahead


@dataclass(frozen=True)
class LevelReport:
    """Sums over rows, float64 [levels] each, so that reports of batches and processes add up.

    loss: unweighted.  rows: rows with a token to learn.  agreed: rows whose best guess is the target's greedy token.
    reached: rows whose guesses above this level all equal the target's tokens and the text.
    accepted: reached rows whose best guess is the target's token.  near: reached rows with that token among the best
    NEAR guesses.
    """

    NEAR: ClassVar[int] = 4

    loss: torch.Tensor
    rows: torch.Tensor
    agreed: torch.Tensor
    reached: torch.Tensor
    accepted: torch.Tensor
    near: torch.Tensor

    @staticmethod
    @torch.no_grad()
    def of(
        losses: Sequence[torch.Tensor],
        ranked: Sequence[torch.Tensor],
        batch: TrainingBatch,
        rows: torch.Tensor | None = None,
    ) -> LevelReport:
        """Counts a batch.

        losses: per level, the sum over its rows.  ranked: per level int64 [B, T, k <= NEAR], its best target ids.
        rows: bool [B, T], the rows that begin a block, whose levels end where a token is not learned; None: all levels
        of all rows.
        """
        sums: list[list[torch.Tensor]] = []
        on_path = batch.tokens.new_ones(batch.tokens.shape, dtype=torch.bool)
        for i, (loss, guesses) in enumerate(zip(losses, ranked, strict=True), start=1):
            truth, wanted = ahead(batch.greedy, i), ahead(batch.wanted, i)
            if rows is not None:
                rows = wanted = wanted & rows
            hits = guesses == truth[..., None]
            best = hits[..., 0]
            reached = on_path & wanted
            counts = (wanted, best & wanted, reached, best & reached, hits.any(-1) & reached)
            sums.append([loss.detach().double(), *(count.sum().double() for count in counts)])
            on_path = reached & best & (ahead(batch.tokens, i + 1) == truth)
        columns = [torch.stack(column).cpu() for column in zip(*sums, strict=True)]
        return LevelReport(*columns)

    def __add__(self, other: LevelReport) -> LevelReport:
        return LevelReport(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def acceptance(self) -> list[float]:
        """By level: the share of best guesses that are accepted, where all best guesses above are."""
        return _share(self.accepted, self.reached)

    @property
    def near_acceptance(self) -> list[float]:
        """By level: the share of rows where one of the best NEAR guesses is accepted, where all best ones above are."""
        return _share(self.near, self.reached)

    @property
    def tau(self) -> float:
        """Expected tokens per cycle of a chain of all levels, the bonus token included."""
        return 1.0 + self._expected(self.acceptance)

    @property
    def near_tau(self) -> float:
        """Expected tokens per cycle of a tree: the best guesses are its backbone, the other best NEAR its siblings."""
        return 1.0 + self._expected(self.near_acceptance)

    def _expected(self, taken: list[float]) -> float:
        on_path = 1.0
        total = 0.0
        for best, some in zip(self.acceptance, taken, strict=True):
            total += on_path * some
            on_path *= best
        return total


def _share(part: torch.Tensor, whole: torch.Tensor) -> list[float]:
    return (part / whole.clamp(min=1)).tolist()
