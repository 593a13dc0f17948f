"""The head of Domino: a GRU reads the drafted path and corrects the slots' logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine.drafters.block.head import BlockHead, PathMemory, at_level, beside
from specengine.drafters.block.vocabulary import Vocabulary
from specengine.drafters.growth import Steps
from specengine.ops.growth.add_delta import add_delta
from specengine.ops.growth.growing_trees import GrownRows, Logits
from specengine.ops.growth.gru_step import GruState, gru_step
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class Gru:
    """The parts. embedding: [V, hidden].  read: [3 G, hidden].  keep: [3 G, G].  Rows: reset, update, new.

    down: [emb, hidden + G] of the correction.  up: [Vd, emb].  prefix: levels that get no correction.
    """

    embedding: Weight
    hidden: int
    read: Projection
    keep: Projection
    down: Projection
    up: Projection
    prefix: int


class GruHead(BlockHead):
    """Corrects the logits of every level behind the first `prefix` ones."""

    def __init__(self, vocabulary: Vocabulary, gru: Gru) -> None:
        super().__init__(vocabulary)
        self._gru = gru

    @property
    def projections(self) -> list[Projection]:
        g = self._gru
        return [*super().projections, g.read, g.keep, g.down, g.up]

    def draft(self, slots: torch.Tensor, roots: torch.Tensor) -> Steps:
        base, states, kept = self.vocabulary.of_levels(slots), PathMemory(), PathMemory()
        state, rows = self._state(roots, None, None, None), None
        while True:
            rows = yield Logits(at_level(base, rows), self._correction(at_level(slots, rows), state.exact, rows))
            states.add(state.exact)
            kept.add(self.ops.linear(state.rounded, self._gru.keep))
            above = None if rows.in_place else rows.above
            state = self._state(rows.tokens, kept.named(rows), states.named(rows), above)

    def _state(
        self, tokens: torch.Tensor, kept: torch.Tensor | None, states: torch.Tensor | None, above: torch.Tensor | None
    ) -> GruState:
        """Returns the states after tokens int32 [R]; see gru_step."""
        g, ops = self._gru, self.ops
        read = ops.linear(self.rows_of(g.embedding, tokens, g.hidden, ops.dtype_for(g.read)), g.read)
        return gru_step(read, kept, states, above, ops.dtype_for(g.keep))

    def _correction(self, slots: torch.Tensor, states: torch.Tensor, rows: GrownRows | None) -> torch.Tensor | None:
        """Returns what logits gain, [R, Vd]. slots: [B, hidden].  states: [R, G], after `rows`; None: the roots."""
        g, ops = self._gru, self.ops
        by_node = rows is not None and rows.by_node
        if not by_node and (rows.level if rows else 0) < g.prefix:
            return None
        wide = ops.linear(beside(slots, states, ops.dtype_for(g.down)), g.down)
        gain = ops.linear(add_delta(None, wide, ops.dtype_for(g.up), silu=True), g.up)
        return gain * (rows.depths >= g.prefix)[:, None] if rows is not None and by_node else gain
