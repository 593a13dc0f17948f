"""What hidden state drafters read: pair k is the target's hidden state of position k and the token at k + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specengine.draft_trees.tree import TreeBatch

if TYPE_CHECKING:
    from specengine.engine.request import Request


class Pairs:
    """The features [M, ..] of the pairs of one request that its drafter has not read.

    first: number of the first.  count: how many.
    """

    def __init__(self, first: int = 0) -> None:
        self.first, self.count = first, 0
        self.hidden_states: list[torch.Tensor] = []

    def add(self, hidden_states: torch.Tensor) -> None:
        """hidden_states: [M, ..] of the positions that follow."""
        self.hidden_states.append(hidden_states)
        self.count += hidden_states.shape[0]

    def take(self, count: int) -> torch.Tensor:
        """HiddenStates of the first `count` pairs, which count as read from now on."""
        hidden_states = self.hidden_states[0] if len(self.hidden_states) == 1 else torch.cat(self.hidden_states)
        left = self.count - count
        self.first, self.count, self.hidden_states = self.first + count, left, [hidden_states[count:]] if left else []
        return hidden_states[:count] if left else hidden_states


def take_pairs(
    requests: Sequence[Request], pairs: Sequence[Pairs], counts: Sequence[int]
) -> tuple[list[list[int]], torch.Tensor]:
    """The first pairs of every request, as many as `counts` says: tokens of each, and hidden states of all [M, ..]."""
    runs = [s.tokens[own.first + 1 :][:count] for s, own, count in zip(requests, pairs, counts, strict=True)]
    taken = [own.take(count) for own, count in zip(pairs, counts, strict=True)]
    return runs, taken[0] if len(taken) == 1 else torch.cat(taken)


@dataclass(frozen=True)
class PairRows:
    """Pairs of several requests as the rows of one drafter pass, a chain of each.

    hidden_states: [M, ..].  last: int64 [B], the row of each request's last pair.
    """

    rows: TreeBatch
    hidden_states: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def take(
        requests: Sequence[Request], pairs: Sequence[Pairs], counts: Sequence[int], device: torch.device
    ) -> PairRows:
        """The first pairs of every request, as many as `counts` says."""
        runs, hidden_states = take_pairs(requests, pairs, counts)
        rows = TreeBatch.chains(runs, device)
        return PairRows(rows, hidden_states, rows.row_start[1:].long() - 1)
