"""The heads of DSpark: a Markov head reads the token above a slot, a confidence head estimates its acceptance.

The Markov head has three kinds. `vanilla` adds W2 W1[token] to a slot's logits. `gated` scales W1[token] by a gate made
of the slot's output before. `rnn` keeps a state along the path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from specengine.drafters.block.head import BlockHead, OpenDraft, PathDraft, Step, of_level
from specengine.drafters.block.vocabulary import Likeliest, Linear, Vocabulary
from specengine.ops.growth.level_trees import GrowingTrees, GrownRows
from specengine.ops.growth.row_inputs import join_rows
from specengine.ops.weight import Projection, Weight

KINDS = ("vanilla", "gated", "rnn")
GatherRows = Callable[[Weight, torch.Tensor, torch.Tensor], None]


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
    """weight: float32 [hidden] or, with_markov, [hidden + rank], the row of W1 last.  bias: float32 [1]."""

    weight: torch.Tensor
    bias: torch.Tensor
    with_markov: bool

    @cached_property
    def projection(self) -> Projection:
        """The same as a linear layer of one row."""
        return Projection((Weight(self.weight[None], 1, "float32"),), self.bias)


class MarkovHead(BlockHead):
    """Adds to every slot's logits what the token above gives; estimates chances where there is a confidence head."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        markov: Markov | None,
        confidence: Confidence | None,
        gather_rows: GatherRows,
    ) -> None:
        super().__init__(vocabulary)
        self.markov, self.confidence, self._gather_rows = markov, confidence, gather_rows

    @property
    def estimates(self) -> bool:
        return self.confidence is not None

    @property
    def projections(self) -> list[Projection]:
        own = [self.markov.after, self.markov.inner] if self.markov else []
        return [*super().projections, *(product for product in own if product is not None)]

    def open(self, outputs: torch.Tensor, count: int) -> OpenDraft:
        base = self.vocabulary.logits(outputs.flatten(0, 1)).view(*outputs.shape[:2], -1)
        return _MarkovDraft(self, outputs, base, self.likeliest(count))

    def rows_before(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Returns rows of W1, float32 [R, rank], of tokens int32 [R]."""
        if self.markov is None:
            return None
        return self.captured_rows(self.markov, tokens.clamp(min=0), torch.float32)

    def captured_rows(self, markov: Markov, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the same on CUDA in a dtype; -1 gives zeros."""
        rows = torch.empty(len(tokens), markov.rank, dtype=dtype, device=tokens.device)
        self._gather_rows(markov.before, tokens, rows)
        return rows

    @property
    def linear(self) -> Linear:
        """Multiplies rows by a projection."""
        return self.vocabulary.linear


class _MarkovDraft(PathDraft):
    """outputs: [levels, B, hidden].  base: [levels, B, Vd], logits of the slots alone."""

    def __init__(self, head: MarkovHead, outputs: torch.Tensor, base: torch.Tensor, likeliest: Likeliest) -> None:
        super().__init__(likeliest)
        self._head, self._outputs, self._base = head, outputs, base

    def step(self, level: int, owners: torch.Tensor | None, tokens: torch.Tensor, memory: torch.Tensor | None) -> Step:
        head = self._head
        slots, logits = (of_level(each, level, owners, len(tokens)) for each in (self._outputs, self._base))
        rows = head.rows_before(tokens)
        if rows is not None and head.markov is not None:
            change, memory = _change(head.markov, head.linear, slots, rows, memory)
            logits = logits + head.linear(change.contiguous(), head.markov.after)
        return Step(logits, memory, _chance(head.confidence, slots, rows))

    def grow(
        self, trees: GrowingTrees, level: int, tokens: torch.Tensor, memory: Any, above: torch.Tensor | None
    ) -> tuple[GrownRows | None, Any]:
        head, markov, sure = self._head, self._head.markov, self._head.confidence
        if markov is not None and (markov.inner is not None or markov.before.data.dtype == torch.uint8):
            return super().grow(trees, level, tokens, memory, above)
        delta, slots = None, self._outputs[level]
        if markov is not None:
            rows = head.captured_rows(markov, tokens, markov.after.weights[0].row_dtype)
            delta = head.linear(rows, markov.after)
        if sure is None:
            return trees.expand(self._base[level], delta), None
        if markov is not None and sure.with_markov:
            slots = join_rows(slots, head.captured_rows(markov, tokens, torch.float32), torch.float32)
        chance = head.linear(slots, sure.projection).view(-1)
        return trees.expand(self._base[level], delta, chance), None


def _change(
    markov: Markov, linear: Linear, slots: torch.Tensor, rows: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns what W2 multiplies, [R, rank], and the state behind these nodes.

    slots: [R, hidden].  rows: [R, rank], of W1.  state: [R, rank] of `rnn`; None at the root.
    """
    if markov.inner is None:
        return rows, None
    if markov.kind == "gated":
        return torch.sigmoid(linear(torch.cat([slots, rows], -1), markov.inner)) * rows, None
    state = torch.zeros_like(rows) if state is None else state
    keep, new, out = linear(torch.cat([state, rows, slots], -1), markov.inner).chunk(3, -1)
    keep = torch.sigmoid(keep)
    return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(new)


def _chance(confidence: Confidence | None, slots: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the chances [R] of the likeliest children; None without a confidence head."""
    if confidence is None:
        return None
    read = torch.cat([slots, rows], -1) if confidence.with_markov and rows is not None else slots
    return torch.sigmoid((read * confidence.weight).sum(-1) + confidence.bias)
