"""Pairs of hidden state and token: pair k is the target's hidden state of position k and the token at k + 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.engine_views import DraftRequest
from specengine.ops.decoder import Rows
from specengine.ops.growth.pairs import Masks
from specengine.ops.row_tools import stack_rows, take_rows


class Pairs:
    """Holds the hidden states [M, ..] of the pairs of one request that its drafter has not read yet.

    first: number of the first pair.  count: how many there are.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.count = 0
        self._hidden_states: list[torch.Tensor] = []
        self._rows: Sequence[int] | None = None  # of the only tensor, where the pairs are not all of its rows

    def add(self, hidden_states: torch.Tensor) -> None:
        """Appends hidden states [M, ..] of the next positions."""
        self._settle()
        self._hidden_states.append(hidden_states)
        self.count += hidden_states.shape[0]

    def add_rows(self, hidden_states: torch.Tensor, rows: Sequence[int]) -> None:
        """Appends some rows of a tensor that is not overwritten; they are copied only where other pairs wait."""
        if self.count:
            self.add(take_rows(hidden_states, rows))
        else:
            self._hidden_states, self._rows, self.count = [hidden_states], rows, len(rows)

    def take(self, count: int) -> torch.Tensor:
        """Returns the hidden states of the first `count` pairs, which count as read from now on."""
        self._settle()
        parts = self._hidden_states
        hidden_states = parts[0] if len(parts) == 1 else torch.cat(parts)
        self.first += count
        self.count -= count
        self._hidden_states = [hidden_states[count:]] if self.count else []
        return hidden_states[:count] if self.count else hidden_states

    def take_all(self) -> tuple[torch.Tensor, Sequence[int]]:
        """Returns hidden states and which of their rows the unread pairs are; the pairs count as read from now on."""
        if self._rows is None:
            hidden_states = self.take(self.count)
            return hidden_states, range(len(hidden_states))
        (hidden_states,), rows = self._hidden_states, self._rows
        self.first += self.count
        self.count, self._hidden_states, self._rows = 0, [], None
        return hidden_states, rows

    def _settle(self) -> None:
        """Copies rows, so that the rest of their tensor is freed."""
        if self._rows is not None:
            self._hidden_states, self._rows = [take_rows(self._hidden_states[0], self._rows)], None


class UnreadPairs(NamedTuple):
    """The unread pairs of several requests.

    tokens: of each request.  hidden_states: [R, ..], of which `rows` are those of all pairs.  cached: pairs that each
    request has read before.
    """

    tokens: list[list[int]]
    hidden_states: torch.Tensor
    rows: Sequence[int]
    cached: list[int]

    @staticmethod
    def take(requests: Sequence[DraftRequest], pairs: Sequence[Pairs]) -> UnreadPairs:
        """Takes every unread pair of every request; those of one pass are not copied."""
        cached = [own.first for own in pairs]
        tokens = [s.tokens[own.first + 1 : own.first + 1 + own.count] for s, own in zip(requests, pairs, strict=True)]
        parts = [own.take_all() for own in pairs]
        hidden_states, rows = parts[0]
        if len(parts) > 1:
            if all(other is hidden_states for other, _ in parts):
                rows = [row for _, own in parts for row in own]
            else:
                hidden_states = stack_rows([take_rows(other, own) for other, own in parts])
                rows = range(len(hidden_states))
        return UnreadPairs(tokens, hidden_states, rows, cached)


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

    hidden_states: [R, ..], of pairs.  last: int64 [B * (1 + masks)], the rows of each last pair and its masks.
    above: int64 [M], the hidden state of each row; masks have the next one after all. None: without masks.
    """

    rows: Rows
    hidden_states: torch.Tensor
    last: torch.Tensor
    above: torch.Tensor | None = None

    @property
    def origin(self) -> torch.Tensor | None:
        """The rows that the next level goes on from; None after masks: there is no next level."""
        return self.last if self.above is None else None

    @staticmethod
    def take(
        requests: Sequence[DraftRequest],
        pairs: Sequence[Pairs],
        counts: Sequence[int],
        device: torch.device,
        masked: bool,
        masks: Masks | None = None,
    ) -> PairRows:
        """Takes the first `counts` pairs of every request.  masked: as TreeBatch.chains does."""
        runs, hidden_states = take_pairs(requests, pairs, counts)
        if masks is None:
            rows = TreeBatch.chains(runs, device, masked=masked)
            return PairRows(rows, hidden_states, rows.row_start[1:].long() - 1)
        rows = TreeBatch.chains([[*run, *[masks.token] * masks.count] for run in runs], device, masked=masked)
        last = rows.row_start[1:, None] + torch.arange(-1 - masks.count, 0, device=device)
        above, first = list[int](), 0
        for run in runs:
            above += [*range(first, first + len(run)), *masks.count * [len(hidden_states)]]
            first += len(run)
        return PairRows(rows, hidden_states, last.view(-1), torch.tensor(above).to(device))
