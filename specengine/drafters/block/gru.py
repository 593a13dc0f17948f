"""The head of Domino: a GRU reads the drafted path and corrects the slots' logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from specengine.drafters.block.head import BlockHead, OpenDraft, PathDraft, Step, of_level
from specengine.drafters.block.vocabulary import Likeliest, Vocabulary
from specengine.ops.growth.add_delta import add_delta
from specengine.ops.growth.gru_step import GruState, gru_step
from specengine.ops.growth.level_trees import GrowingTrees, GrownRows
from specengine.ops.growth.row_inputs import join_rows
from specengine.ops.weight import Projection, Weight

GatherRows = Callable[[Weight, torch.Tensor, torch.Tensor], None]


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

    def __init__(self, vocabulary: Vocabulary, gru: Gru, gather_rows: GatherRows) -> None:
        super().__init__(vocabulary)
        self._gru, self._gather_rows = gru, gather_rows

    @property
    def projections(self) -> list[Projection]:
        g = self._gru
        return [*super().projections, g.read, g.keep, g.down, g.up]

    def open(self, outputs: torch.Tensor, count: int) -> OpenDraft:
        base = self.vocabulary.logits(outputs.flatten(0, 1)).view(*outputs.shape[:2], -1)
        return _GruDraft(self, outputs, base, self.likeliest(count))

    def next_state(self, tokens: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """Returns the state [R, G] behind tokens int32 [R]; without a state they are roots."""
        g, linear = self._gru, self.vocabulary.linear
        rows = torch.empty(len(tokens), g.hidden, device=tokens.device)
        self._gather_rows(g.embedding, tokens.clamp(min=0), rows)
        reset, update, new = linear(rows, g.read).chunk(3, -1)
        if state is None:
            state = torch.zeros_like(reset)
        kept_reset, kept_update, kept_new = linear(state.contiguous(), g.keep).chunk(3, -1)
        update = torch.sigmoid(update + kept_update)
        new = torch.tanh(new + torch.sigmoid(reset + kept_reset) * kept_new)
        return (1 - update) * new + update * state

    def captured_state(self, tokens: torch.Tensor, state: GruState | None, above: torch.Tensor | None) -> GruState:
        """Returns the states behind tokens on CUDA; above: int64 [R], the states before that these continue."""
        g, linear = self._gru, self.vocabulary.linear
        rows = torch.empty(len(tokens), g.hidden, dtype=g.read.weights[0].row_dtype, device=tokens.device)
        self._gather_rows(g.embedding, tokens, rows)
        kept = None if state is None else linear(state.rounded, g.keep)
        return gru_step(linear(rows, g.read), kept, state, above, g.keep.weights[0].row_dtype)

    def captured_correction(self, level: int, slots: torch.Tensor, state: GruState) -> torch.Tensor | None:
        """Returns what a level's logits gain on CUDA, [R, Vd]. slots: [B, hidden]."""
        g, linear = self._gru, self.vocabulary.linear
        if level < g.prefix:
            return None
        joined = join_rows(slots, state.exact, g.down.weights[0].row_dtype)
        return linear(add_delta(None, linear(joined, g.down), g.up.weights[0].row_dtype, silu=True), g.up)

    @property
    def coded(self) -> bool:
        """Whether its embedding has codes, whose rows another op decodes."""
        return self._gru.embedding.data.dtype == torch.uint8

    def correction(self, level: int, slots: torch.Tensor, state: torch.Tensor) -> torch.Tensor | None:
        """Returns what a level's logits gain, [R, Vd]. slots: [R, hidden].  state: [R, G]."""
        g, linear = self._gru, self.vocabulary.linear
        if level < g.prefix:
            return None
        return linear(torch.nn.functional.silu(linear(torch.cat([slots, state], -1), g.down)), g.up)


class _GruDraft(PathDraft):
    """outputs: [levels, B, hidden].  base: [levels, B, Vd], logits of the slots alone."""

    def __init__(self, head: GruHead, outputs: torch.Tensor, base: torch.Tensor, likeliest: Likeliest) -> None:
        super().__init__(likeliest)
        self._head, self._outputs, self._base = head, outputs, base

    def step(self, level: int, owners: torch.Tensor | None, tokens: torch.Tensor, memory: torch.Tensor | None) -> Step:
        state = self._head.next_state(tokens, memory)
        slots, logits = (of_level(each, level, owners, len(tokens)) for each in (self._outputs, self._base))
        gain = self._head.correction(level, slots, state)
        return Step(logits if gain is None else logits + gain, state)

    def grow(
        self, trees: GrowingTrees, level: int, tokens: torch.Tensor, memory: Any, above: torch.Tensor | None
    ) -> tuple[GrownRows | None, Any]:
        if self._head.coded:
            return super().grow(trees, level, tokens, memory, above)
        state = self._head.captured_state(tokens, memory, above)
        gain = self._head.captured_correction(level, self._outputs[level], state)
        return trees.expand(self._base[level], gain), state
