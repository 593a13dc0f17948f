"""What feature drafters read: pair k is the target's feature of position k and the token at k + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specengine.draft_trees.tree import TreeBatch

if TYPE_CHECKING:
    from specengine.engine.request import Sequence as TokenSequence


class Pairs:
    """The features [M, ..] of the pairs of one sequence that its drafter has not read.

    first: number of the first.  count: how many.
    """

    def __init__(self, first: int = 0) -> None:
        self.first, self.count = first, 0
        self.features: list[torch.Tensor] = []

    def add(self, features: torch.Tensor) -> None:
        """features: [M, ..] of the positions that follow."""
        self.features.append(features)
        self.count += features.shape[0]

    def take(self, count: int) -> torch.Tensor:
        """Features of the first `count` pairs, which count as read from now on."""
        features = self.features[0] if len(self.features) == 1 else torch.cat(self.features)
        left = self.count - count
        self.first, self.count, self.features = self.first + count, left, [features[count:]] if left else []
        return features[:count] if left else features


def take_pairs(
    sequences: Sequence[TokenSequence], pairs: Sequence[Pairs], counts: Sequence[int]
) -> tuple[list[list[int]], torch.Tensor]:
    """The first pairs of every sequence, as many as `counts` says: tokens of each, and features of all [M, ..]."""
    runs = [s.tokens[own.first + 1 :][:count] for s, own, count in zip(sequences, pairs, counts, strict=True)]
    taken = [own.take(count) for own, count in zip(pairs, counts, strict=True)]
    return runs, taken[0] if len(taken) == 1 else torch.cat(taken)


@dataclass(frozen=True)
class PairRows:
    """Pairs of several sequences as the rows of one drafter pass, a chain of each.

    features: [M, ..].  last: int64 [B], the row of each sequence's last pair.
    """

    rows: TreeBatch
    features: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def take(
        sequences: Sequence[TokenSequence], pairs: Sequence[Pairs], counts: Sequence[int], device: torch.device
    ) -> PairRows:
        """The first pairs of every sequence, as many as `counts` says."""
        runs, features = take_pairs(sequences, pairs, counts)
        rows = TreeBatch.chains(runs, device)
        return PairRows(rows, features, rows.row_start[1:].long() - 1)
