"""The candidate selector of DFlash 2: of a slot's likeliest tokens it scores those that follow the token above."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.drafters.block.head import BlockHead, at_level, shared
from specengine.drafters.block.vocabulary import Vocabulary
from specengine.drafters.growth import Steps
from specengine.ops.growth.growing_trees import Children
from specengine.ops.growth.top_tokens import top_tokens
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class Selector:
    """The parts. before, after: [V, rank], rows of the target's tokens.  hidden: [rank, hidden].

    count: candidates of a slot.
    """

    before: Weight
    after: Weight
    hidden: Projection
    rank: int
    count: int


class SelectorHead(BlockHead):
    """Keeps the likeliest tokens of every slot and adds to each a product with the token above."""

    def __init__(self, vocabulary: Vocabulary, selector: Selector) -> None:
        super().__init__(vocabulary)
        self._selector = selector

    @property
    def projections(self) -> list[Projection]:
        return [*super().projections, self._selector.hidden]

    @property
    def most_children(self) -> int:
        return self._selector.count

    def draft(self, slots: torch.Tensor, roots: torch.Tensor) -> Steps:
        s, vocabulary, shape = self._selector, self.vocabulary, slots.shape[:2]
        logits = vocabulary.logits(slots.flatten(0, 1))
        own = top_tokens(logits, s.count)[0].clamp(min=0)
        kept = vocabulary.scaled(logits.gather(1, own.long()))
        after = self.rows_of(s.after, vocabulary.target_ids(own).flatten(), s.rank, torch.float32)
        after = after.view(*own.shape, s.rank)
        hidden = self.ops.linear(slots.flatten(0, 1).contiguous(), s.hidden)
        # Of every slot: its candidates and their logits, [levels, B, k], and what the token above is multiplied by.
        own, kept, after, hidden = (each.view(*shape, *each.shape[1:]) for each in (own, kept, after, hidden))
        tokens, rows = roots, None
        while True:
            here = (at_level(each, rows) for each in (own, kept, after, hidden))
            candidates, scores, following, factors = (shared(each, len(tokens)) for each in here)
            above = self.rows_of(s.before, tokens, s.rank, torch.float32) * factors
            scores = scores + (following * above[:, None]).sum(-1)
            # Of equals the likelier candidate is first.
            best = scores.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
            rows = yield Children(candidates.gather(1, best.indices), best.values)
            tokens = rows.tokens
