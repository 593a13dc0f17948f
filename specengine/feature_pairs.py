"""What feature drafters read: pair k is the target's feature of position k and the token at k + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specengine.tree import TreeBatch


@dataclass
class Pairs:
    """The pairs of one sequence that its drafter has not read yet. first: number of the first of them."""

    first: int = 0
    tokens: list[int] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)

    def add(self, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """features: [M, ..] of consecutive positions.  tokens: those that follow each of them."""
        self.tokens += tokens
        self.features.append(features)

    def take(self, count: int) -> tuple[list[int], torch.Tensor]:
        """Tokens and features of the first `count` pairs, which count as read from now on."""
        features = self.features[0] if len(self.features) == 1 else torch.cat(self.features)
        tokens, self.tokens = self.tokens[:count], self.tokens[count:]
        self.features = [features[count:]] if self.tokens else []
        self.first += count
        return tokens, features[:count]


@dataclass(frozen=True)
class PairRows:
    """Pairs of several sequences as the rows of one drafter pass, a chain of each.

    features: [M, ..].  last: int64 [B], the row of each sequence's last pair.
    """

    rows: TreeBatch
    features: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def take(pairs: Sequence[Pairs], counts: Sequence[int], device: torch.device) -> PairRows:
        """The first pairs of every sequence, as many as `counts` says."""
        taken = [own.take(count) for own, count in zip(pairs, counts, strict=True)]
        features = taken[0][1] if len(taken) == 1 else torch.cat([features for _, features in taken])
        rows = TreeBatch.chains([tokens for tokens, _ in taken], device)
        return PairRows(rows, features, rows.row_start[1:].long() - 1)
