"""The candidate selector of DFlash 2: of a slot's likeliest tokens it scores those that follow the token above."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specengine.drafters.block.head import BlockHead, Children, OpenDraft, Step, of_level
from specengine.drafters.block.vocabulary import Best, Vocabulary
from specengine.ops.weight import Projection, Weight

GatherRows = Callable[[Weight, torch.Tensor, torch.Tensor], None]


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

    def __init__(self, vocabulary: Vocabulary, selector: Selector, gather_rows: GatherRows) -> None:
        super().__init__(vocabulary)
        self._selector, self._gather_rows = selector, gather_rows

    @property
    def projections(self) -> list[Projection]:
        return [*super().projections, self._selector.hidden]

    @property
    def most_children(self) -> int:
        return self._selector.count

    def open(self, outputs: torch.Tensor, count: int) -> OpenDraft:
        s, vocabulary = self._selector, self.vocabulary
        levels, batch, _ = outputs.shape
        slots = outputs.flatten(0, 1)
        logits = vocabulary.logits(slots)
        own = self.likeliest(s.count).own(logits)[0].long()
        rows = torch.empty(own.numel(), s.rank, device=own.device)
        tokens = vocabulary.target_ids(own.int())
        self._gather_rows(s.after, tokens.flatten().contiguous(), rows)
        shape = (levels, batch, s.count)
        return _SelectorDraft(
            self,
            own.view(shape),
            tokens.view(shape),
            vocabulary.scaled(logits.gather(1, own)).view(shape),
            vocabulary.linear(slots, s.hidden).view(levels, batch, -1),
            rows.view(*shape, s.rank),
            count,
        )

    def rows_before(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns rows float32 [R, rank] of tokens int32 [R] that stand above."""
        rows = torch.empty(len(tokens), self._selector.rank, device=tokens.device)
        self._gather_rows(self._selector.before, tokens.clamp(min=0), rows)
        return rows


@dataclass(frozen=True)
class _SelectorDraft(OpenDraft):
    """own, tokens: [levels, B, k], candidates by the drafter's and the target's ids.  scores: their logits.

    hidden: [levels, B, rank].  after: [levels, B, k, rank].  count: children of every node.
    """

    head: SelectorHead
    own: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    hidden: torch.Tensor
    after: torch.Tensor
    count: int

    def step(self, level: int, owners: torch.Tensor | None, tokens: torch.Tensor, memory: torch.Tensor | None) -> Step:
        scores = self._scores(level, owners, tokens)
        logits = scores.new_full((len(scores), self.head.vocabulary.head.rows), -torch.inf)
        return Step(logits.scatter(1, of_level(self.own, level, owners, len(tokens)), scores))

    def children(self, level: int, owners: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor | None) -> Children:
        ranks, log_probs = self._ranked(level, owners, tokens)
        return Children(self.tokens[level, owners].gather(1, ranks), log_probs.contiguous())

    def best(self, level: int, tokens: torch.Tensor, memory: torch.Tensor | None) -> tuple[Best, torch.Tensor | None]:
        ranks, log_probs = self._ranked(level, None, tokens)
        own = of_level(self.own, level, None, len(tokens)).gather(1, ranks).int()
        return Best(torch.cat([own[:, :1], own], 1), torch.cat([log_probs[:, :1], log_probs], 1)), None

    def _ranked(
        self, level: int, owners: torch.Tensor | None, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the places of the best candidates and their log-probabilities, [R, count] each."""
        log_probs = self._scores(level, owners, tokens).log_softmax(-1)
        best = log_probs.sort(dim=-1, descending=True, stable=True)  # of equals the likelier candidate first
        return best.indices[:, : self.count], best.values[:, : self.count]

    def _scores(self, level: int, owners: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the candidates' scores float32 [R, k] behind tokens int32 [R]."""
        hidden, scores, after = (
            of_level(each, level, owners, len(tokens)) for each in (self.hidden, self.scores, self.after)
        )
        above = self.head.rows_before(tokens) * hidden
        return scores + (after * above[:, None]).sum(-1)
