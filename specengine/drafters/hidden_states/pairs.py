"""Pairs of hidden state and token: pair k is the target's hidden state of position k and the token at k + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.engine_views import DraftRequest


class Pairs:
    """Holds the hidden states [M, ..] of the pairs of one request that its drafter has not read yet.

    first: number of the first pair.  count: how many there are.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.count = 0
        self.hidden_states: list[torch.Tensor] = []

    def add(self, hidden_states: torch.Tensor) -> None:
        """Appends hidden states [M, ..] of the next positions."""
        self.hidden_states.append(hidden_states)
        self.count += hidden_states.shape[0]

    def take(self, count: int) -> torch.Tensor:
        """Returns the hidden states of the first `count` pairs, which count as read from now on."""
        hidden_states = self.hidden_states[0] if len(self.hidden_states) == 1 else torch.cat(self.hidden_states)
        self.first += count
        self.count -= count
        self.hidden_states = [hidden_states[count:]] if self.count else []
        return hidden_states[:count] if self.count else hidden_states


@dataclass
class PairState:
    """What a drafter that reads pairs remembers of one request.

    drafted: the last draft, before it was cut.  behind: pairs are missing, so nothing is drafted for the request.
    """

    pairs: Pairs = field(default_factory=Pairs)
    drafted: ScoredTree | None = None
    behind: bool = False


def take_pairs(
    requests: Sequence[DraftRequest], pairs: Sequence[Pairs], counts: Sequence[int]
) -> tuple[list[list[int]], torch.Tensor]:
    """Takes the first `counts` pairs of every request; returns their tokens and all their hidden states [M, ..]."""
    runs = [s.tokens[own.first + 1 :][:count] for s, own, count in zip(requests, pairs, counts, strict=True)]
    taken = [own.take(count) for own, count in zip(pairs, counts, strict=True)]
    return runs, taken[0] if len(taken) == 1 else torch.cat(taken)


@dataclass(frozen=True)
class PairRows:
    """Pairs of several requests as the rows of one drafter pass, one chain per request.

    hidden_states: [M, ..].  last: int64 [B], the row of each request's last pair.
    """

    rows: TreeBatch
    hidden_states: torch.Tensor
    last: torch.Tensor

    @staticmethod
    def take(
        requests: Sequence[DraftRequest], pairs: Sequence[Pairs], counts: Sequence[int], device: torch.device
    ) -> PairRows:
        """Takes the first `counts` pairs of every request."""
        runs, hidden_states = take_pairs(requests, pairs, counts)
        rows = TreeBatch.chains(runs, device)
        return PairRows(rows, hidden_states, rows.row_start[1:].long() - 1)
