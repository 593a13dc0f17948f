"""The tokens that the columns of a drafter's logits stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Columns:
    """The vocabulary of a drafter beside the target's.

    count: columns of its logits.  tokens: the target's token of each, None: column t is token t.
    index: int32 [V], the column of each of the target's tokens, -1: it has none; None: the vocabularies are the same.
    """

    count: int
    tokens: list[int] | None
    index: torch.Tensor | None

    @staticmethod
    def of(tokens: torch.Tensor | None, count: int, vocab: int, device: torch.device) -> Columns:
        """Returns the columns of a head. tokens: int32 [count] or None.  vocab: tokens of the target."""
        if tokens is None and count == vocab:
            return Columns(count, None, None)
        own = [*range(count)] if tokens is None else tokens.tolist()
        index = torch.full((vocab,), -1, dtype=torch.int32)
        index[torch.tensor(own)] = torch.arange(count, dtype=torch.int32)
        return Columns(count, None if tokens is None else own, index.to(device))

    def token_ids(self, columns: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the target's tokens of rows of columns."""
        if self.tokens is None:
            return [list(row) for row in columns]
        return [[self.tokens[column] for column in row] for row in columns]

    def of_tokens(self, tokens: Sequence[int]) -> list[int]:
        """Returns the columns of tokens of the target that have one."""
        return list(tokens) if self.index is None else self.index[list(tokens)].tolist()
