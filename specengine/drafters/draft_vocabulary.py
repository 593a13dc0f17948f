"""The tokens that a drafter's logits have columns for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DraftVocabulary:
    """The vocabulary of a drafter beside the target's.

    count: columns of its logits.  tokens: int32 [count], the target's token of each; None: column t is token t.
    index: int32 [V], the column of each of the target's tokens, -1: it has none; None: the vocabularies are the same.
    """

    count: int
    tokens: torch.Tensor | None
    index: torch.Tensor | None

    @staticmethod
    def of(tokens: torch.Tensor | None, count: int, vocab: int, device: torch.device) -> DraftVocabulary:
        """Returns the columns of a head. tokens: int32 [count] or None.  vocab: tokens of the target."""
        if tokens is None and count == vocab:
            return DraftVocabulary(count, None, None)
        own = torch.arange(count) if tokens is None else tokens.cpu().long()
        index = torch.full((vocab,), -1, dtype=torch.int32)
        index[own] = torch.arange(count, dtype=torch.int32)
        return DraftVocabulary(count, None if tokens is None else tokens.int().to(device), index.to(device))
