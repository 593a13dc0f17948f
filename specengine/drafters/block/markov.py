"""The heads of DSpark: a Markov head reads the token above a slot, a confidence head estimates its acceptance.

The Markov head has three kinds. `vanilla` adds W2 W1[token] to a slot's logits. `gated` scales W1[token] by a gate made
of the slot's output before. `rnn` keeps a state along the path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.drafters.block.head import BlockHead, PathMemory, at_level, beside, shared
from specengine.drafters.block.vocabulary import Vocabulary
from specengine.drafters.growth import Steps
from specengine.ops.growth.growing_trees import GrownRows, Logits
from specengine.ops.weight import Projection, Weight

KINDS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class Markov:
    """kind: of KINDS.  before: W1 [V, rank], rows of the target's tokens.  after: W2 [Vd, rank].

    inner: of `gated` [rank, hidden + rank], of `rnn` [3 rank, 2 rank + hidden]; None otherwise.
    """

    kind: str
    before: Weight
    after: Projection
    inner: Projection | None
    rank: int


@dataclass(frozen=True)
class Confidence:
    """projection: float32 [1, hidden] or, with_markov, [1, hidden + rank], the row of W1 last."""

    projection: Projection
    with_markov: bool


class MarkovHead(BlockHead):
    """Adds to every slot's logits what the token above gives; estimates chances where there is a confidence head."""

    def __init__(self, vocabulary: Vocabulary, markov: Markov | None, confidence: Confidence | None) -> None:
        super().__init__(vocabulary)
        self.markov, self.confidence = markov, confidence

    @property
    def estimates(self) -> bool:
        return self.confidence is not None

    @property
    def projections(self) -> list[Projection]:
        own = [self.markov.after, self.markov.inner] if self.markov else []
        return [*super().projections, *(product for product in own if product is not None)]

    def draft(self, slots: torch.Tensor, roots: torch.Tensor) -> Steps:
        base, memory = self.vocabulary.of_levels(slots), PathMemory()
        tokens, rows = roots, None
        while True:
            own = at_level(slots, rows)
            delta = self._delta(self.markov, tokens, own, memory, rows) if self.markov else None
            rows = yield Logits(at_level(base, rows), delta, self._confidence(tokens, own))
            tokens = rows.tokens

    def _delta(
        self, markov: Markov, tokens: torch.Tensor, slots: torch.Tensor, memory: PathMemory, rows: GrownRows | None
    ) -> torch.Tensor:
        """Returns what is added to logits, [R, Vd]. tokens: int32 [R].  slots: [B, hidden].  memory: of `rnn`."""
        dtype = self.ops.dtype_for(markov.after) if markov.inner is None else torch.float32
        change = self.rows_of(markov.before, tokens, markov.rank, dtype)
        if markov.kind == "gated" and markov.inner is not None:
            change = torch.sigmoid(self.ops.linear(beside(slots, change, torch.float32), markov.inner)) * change
        elif markov.inner is not None:
            state = torch.zeros_like(change) if rows is None else memory.above(rows)
            read = torch.cat([state, change, shared(slots, len(change))], -1)
            keep, new, out = self.ops.linear(read, markov.inner).chunk(3, -1)
            keep = torch.sigmoid(keep)
            memory.add(keep * state + (1 - keep) * torch.tanh(new))
            change = torch.tanh(out)
        return self.ops.linear(change.contiguous(), markov.after)

    def _confidence(self, tokens: torch.Tensor, slots: torch.Tensor) -> torch.Tensor | None:
        """Returns logits of the chances of the likeliest children, [B], or [R] where they depend on their tokens."""
        if self.confidence is None:
            return None
        if self.markov is not None and self.confidence.with_markov:
            rows = self.rows_of(self.markov.before, tokens, self.markov.rank, torch.float32)
            slots = beside(slots, rows, torch.float32)
        return self.ops.linear(slots.contiguous(), self.confidence.projection).view(-1)
