"""The tokens that a block drafter's head knows: their logits, and the likeliest of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specengine.drafters.backbone_expanders import BackboneExpanders
from specengine.ops.weight import Projection

Linear = Callable[[torch.Tensor, Projection], torch.Tensor]


@dataclass(frozen=True)
class Vocabulary:
    """The logits of the drafter's tokens. tokens: int32 [Vd], the target's; None: they are the same.

    multiplier: of the logits.  softcap: c tanh(x / c) follows; 0: it does not.
    """

    head: Projection
    linear: Linear
    tokens: torch.Tensor | None = None
    multiplier: float = 1.0
    softcap: float = 0.0

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns float32 [M, Vd] of outputs [M, hidden], before multiplier and softcap."""
        return self.linear(rows.contiguous(), self.head)

    def scaled(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies multiplier and softcap."""
        if self.multiplier != 1:
            logits = logits * self.multiplier
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def target_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the target's ids of the drafter's tokens; -1 stays."""
        return tokens if self.tokens is None else torch.where(tokens < 0, tokens, self.tokens[tokens.long()])


class Best(NamedTuple):
    """The likeliest children of R nodes in columns 1 to k, likeliest first.

    tokens: int32 [R, 1 + k], the drafter's.  scores: float32 [R, 1 + k], log-probabilities.
    """

    tokens: torch.Tensor
    scores: torch.Tensor


class Likeliest:
    """Finds the likeliest tokens of rows of logits, of equals the lower one first."""

    def __init__(self, vocabulary: Vocabulary, count: int) -> None:
        self._vocabulary, self._expanders = vocabulary, BackboneExpanders([count])

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the target's tokens int32 [M, k] and log-probabilities float32 [M, k] of logits [M, Vd]."""
        tokens, log_probs = self.own(logits)
        return self._vocabulary.target_ids(tokens), log_probs

    def own(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the same with the drafter's tokens."""
        best = self.best(logits)
        return best.tokens[:, 1:].clone(), best.scores[:, 1:].clone()

    def best(self, logits: torch.Tensor) -> Best:
        """Returns the same in memory that the next call with as many rows overwrites."""
        best = self._expanders(logits.contiguous()[:, None])
        return Best(best.tokens, best.scores)
