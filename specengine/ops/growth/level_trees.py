"""Trees that grow level by level inside captured cycles, a kernel for each level (EAGLE-2 section 4.1); CUDA only.

Candidates are those of draft_trees/dynamic.py, in its order, below the root. Shapes: B requests, k children of an
expanded node, w nodes that a level expands, W words of ancestor bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from specengine import _C
from specengine.ops.select_nodes import Columns


class Cape(NamedTuple):
    """How many children a row has: widths[number of thresholds below its highest probability].

    thresholds: float32 [C], ascending.  widths: int32 [C + 1], at most k.
    """

    thresholds: torch.Tensor
    widths: torch.Tensor

    @staticmethod
    def of(widths: Sequence[int], thresholds: Sequence[float], device: torch.device) -> Cape | None:
        """Returns the classes of some widths; None of one alone, which is k."""
        if not thresholds:
            return None
        return Cape(torch.tensor(thresholds, device=device), torch.tensor(widths, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class GrowthPlan:
    """What all trees of a batch share; made once, since captured graphs hold on to it.

    children: k.  widths: w of every level but the last.  orders: int32 [w] of each, entries of the level to expand;
    None: the best ones.  root: the row before the first level.  row_starts: int32 [B + 1] per width.
    arrived: int32 [B], zeros for expand().
    """

    children: int
    widths: tuple[int, ...]
    orders: tuple[torch.Tensor | None, ...]
    root: _C.BeamRows
    row_starts: dict[int, torch.Tensor]
    arrived: torch.Tensor

    @staticmethod
    def of(batch: int, levels: int, children: int, beam: int, words: int, device: torch.device) -> GrowthPlan:
        """Plans trees that expand the best `beam` nodes of a level; below one node these are its first children."""
        widths: list[int] = []
        orders: list[torch.Tensor | None] = []
        before = 1
        for _ in range(levels - 1):
            width = min(beam, children * before)
            widths.append(width)
            orders.append(torch.arange(width, dtype=torch.int32, device=device) if before == 1 else None)
            before = width
        return GrowthPlan._of(batch, children, widths, orders, words, device)

    @staticmethod
    def ordered(batch: int, children: int, orders: Sequence[torch.Tensor], words: int) -> GrowthPlan:
        """Plans trees that expand given entries of a level. orders: int32 [w] of each level but the last."""
        return GrowthPlan._of(batch, children, [len(order) for order in orders], orders, words, orders[0].device)

    @staticmethod
    def _of(
        batch: int,
        children: int,
        widths: Sequence[int],
        orders: Sequence[torch.Tensor | None],
        words: int,
        device: torch.device,
    ) -> GrowthPlan:
        root = _rows(batch, 1, words, device)
        root.beam.zero_()
        root.ancestors.zero_()
        root.ancestors[:, 0] = 1
        starts = {
            width: torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device) for width in set(widths)
        }
        arrived = torch.zeros(batch, dtype=torch.int32, device=device)
        return GrowthPlan(children, tuple(widths), tuple(orders), root, starts, arrived)


@dataclass(frozen=True)
class GrownRows:
    """The rows of a level's expanded nodes, as those of a TreeBatch.

    above: int64 [B * w], the rows of their parents in the level before.  first_node: their first number.
    in_place: whether each row continues the row of its number.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor
    above: torch.Tensor
    first_node: int
    in_place: bool


class GrowingTrees:
    """Holds the candidates of B trees while they grow; nothing is read by the host.

    roots: int32 [B, 1].  known: int32 [B], 0: nothing is drafted for the request.
    token_ids: int32 [Vd], the target's tokens; None: the drafter's are the same.
    origin: int64 [B], the rows that the first level's `above` names for the roots; None: 0 to B - 1.
    """

    def __init__(
        self,
        plan: GrowthPlan,
        roots: torch.Tensor,
        known: torch.Tensor,
        token_ids: torch.Tensor | None,
        origin: torch.Tensor | None = None,
    ) -> None:
        self._plan, self._roots, self._known, self._token_ids = plan, roots, known, token_ids
        self._origin = origin
        size = (len(roots), 1 + plan.children * sum((1, *plan.widths)))
        tokens, parents, depths = (torch.empty(size, dtype=torch.int32, device=roots.device) for _ in range(3))
        self._candidates = _C.CandidateColumns(tokens, parents, depths, torch.empty(size, device=roots.device))
        self._before, self._level = plan.root, 0
        self._first = self._first_node = 1

    def grow(self, tokens: torch.Tensor, scores: torch.Tensor) -> GrownRows | None:
        """Adds a level; returns the rows whose children come next, None behind the last level.

        tokens, scores: int32 and float32 [R, k], the children of the R rows before, or of each request's root, which
        all its rows share: the drafter's tokens, -1 where there is no child, and their log-probabilities.
        """
        return self._add_level(partial(_C.grow_level, tokens, scores))

    def expand(
        self,
        logits: torch.Tensor,
        delta: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
        cape: Cape | None = None,
    ) -> GrownRows | None:
        """Adds a level as grow() does, of the likeliest children of each row before, in one launch.

        logits: float32 [B * w, Vd], of these rows; [B, Vd] where the rows of a request share them.
        delta: float32 [B * w, Vd], added to them.  confidence: float32 [B * w] or [B], the logit of the chance that the
        first child is accepted; scores are then logarithms of chances, see block.head.Children.
        cape: None: every row has k children.
        """
        parts = (self._before.beam.numel(), -(-logits.shape[1] // _C.VOCABULARY_PART))
        best = torch.empty(*parts, self._plan.children, dtype=torch.int32, device=logits.device)
        sums = torch.empty(parts, device=logits.device)
        room = _C.VocabularyParts(best, torch.empty_like(best, dtype=torch.float32), sums, self._plan.arrived)
        level = _C.LevelLogits(logits, delta, confidence, *(cape or (None, None)))
        return self._add_level(partial(_C.expand_level, level, room))

    def _add_level(self, write: Callable[..., None]) -> GrownRows | None:
        """Adds a level by an op that gets all but its children."""
        plan, level = self._plan, self._level
        last = level == len(plan.widths)
        width, order = (0, None) if last else (plan.widths[level], plan.orders[level])
        before = self._before
        batch, words = len(self._roots), before.ancestors.shape[1]
        after = _rows(batch, width, words, self._roots.device)
        origin = self._origin if level == 0 else None
        write(
            *(self._token_ids, order, None, self._roots, self._known, self._candidates, before, after),
            *(origin, self._first, self._first_node),
        )
        first_node = self._first_node
        self._first += plan.children * before.beam.shape[1]
        self._first_node += width
        self._before, self._level = after, level + 1
        if last:
            return None
        in_place = origin is None and before.beam.shape[1] == width == 1
        start = plan.row_starts[width]
        return GrownRows(after.tokens, after.depths, start, after.ancestors, after.above, first_node, in_place)

    @property
    def columns(self) -> Columns:
        """Tokens, parents, depths and scores of root and candidates, [B, 1 + C] each."""
        tokens, parents, depths, scores = self._candidates
        return tokens, parents, depths, scores


def _rows(batch: int, width: int, words: int, device: torch.device) -> _C.BeamRows:
    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows = batch * width
    return _C.BeamRows(ints(batch, width), ints(rows), ints(rows), ints(rows, words), ints(rows, dtype=torch.int64))
