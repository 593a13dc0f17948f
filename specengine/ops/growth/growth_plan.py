"""How trees grow that a batch has in common: their levels, and the tensors that the ops of every level read.

Shapes: B requests, k children of an open node at most, w open nodes of a level, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from specengine import _C
from specengine.draft_trees.rank_paths import RankTree
from specengine.draft_trees.shapes import Beam, BestFirst, Ranks, Shape
from specengine.ops.growth.expand_levels import LevelShape


class Level(NamedTuple):
    """How a level grows. children: k.  rows: w.  next: nodes that are opened after it, 0 after the last level.

    entries: int32 [E], which of the w k children the level has; None: all.
    order: int32 [next], the entries to open; None: the best ones.
    """

    children: int
    rows: int
    next: int
    entries: torch.Tensor | None
    order: torch.Tensor | None

    @property
    def size(self) -> int:
        """The candidates of the level."""
        return self.rows * self.children if self.entries is None else len(self.entries)


@dataclass(frozen=True)
class GrowthPlan:
    """What all trees of a batch share; made once, since captured graphs hold on to it.

    root: the row before the first level.  row_starts: int32 [B + 1] per width.  arrived: int32 [B], zeros for ops.
    """

    shape: Shape
    levels: tuple[Level, ...]
    root: _C.BeamRows
    row_starts: dict[int, torch.Tensor]
    arrived: torch.Tensor

    @staticmethod
    def of(shape: Shape, batch: int, device: torch.device) -> GrowthPlan:
        """Plans the trees of a shape."""
        levels: tuple[Level, ...] = ()
        if isinstance(shape, Beam):
            levels = _beam_levels(shape, device)
        elif isinstance(shape, Ranks):
            levels = _rank_levels(shape.tree, device)
        words = -(-(1 + sum(level.next for level in levels)) // 32)
        root = empty_rows(batch, 1, words, device)
        root.beam.zero_()
        root.ancestors.zero_()
        root.ancestors[:, 0] = 1
        starts = {
            width: torch.arange(0, batch * width + 1, width, dtype=torch.int32, device=device)
            for width in {level.next for level in levels} - {0} or {1}
        }
        return GrowthPlan(shape, levels, root, starts, torch.zeros(batch, dtype=torch.int32, device=device))

    @property
    def candidates(self) -> int:
        """Columns of the candidates, the root's included."""
        return 1 + sum(level.size for level in self.levels)

    @cached_property
    def level_shape(self) -> LevelShape | None:
        """The shape of trees that grow in one launch, where all levels are known at once; None: they grow by levels."""
        shape, device = self.shape, self.arrived.device
        if isinstance(shape, BestFirst):
            return LevelShape.best_first(shape.kind, shape.nodes, shape.children, shape.beta)
        if isinstance(shape, Ranks) and not shape.widths:
            return LevelShape.ranks(shape.tree.first(len(shape.tree), shape.levels), device)  # level by level
        if isinstance(shape, Ranks) or max(shape.opened) > 1 or 0 in shape.widths:
            return None  # the op gives every opened node a child
        return LevelShape.backbone(shape.levels, shape.widths or (shape.children,), shape.thresholds, device)

    @cached_property
    def cape(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The thresholds, float32 [C], and widths, int32 [C + 1], of a shape that has them; see Beam."""
        if isinstance(self.shape, BestFirst) or not self.shape.widths:
            return None
        device = self.arrived.device
        widths = torch.tensor(self.shape.widths, dtype=torch.int32, device=device)
        return torch.tensor(self.shape.thresholds, dtype=torch.float32, device=device), widths

    @cached_property
    def owners(self) -> list[torch.Tensor]:
        """The request of each row of a level, int32 [B * w]."""
        batch, device = len(self.arrived), self.arrived.device
        requests = torch.arange(batch, dtype=torch.int32, device=device)
        return [requests.repeat_interleave(level.rows) for level in self.levels]

    @cached_property
    def equal_scores(self) -> list[torch.Tensor]:
        """Zeros for the children of a level, float32 [B * w, k]."""
        batch, device = len(self.arrived), self.arrived.device
        return [torch.zeros(batch * level.rows, level.children, device=device) for level in self.levels]

    @cached_property
    def root_columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Parents and depths of the roots alone, int32 [B], and where each tree begins, int32 [B + 1]."""
        batch, device = len(self.arrived), self.arrived.device
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        return torch.full_like(self.arrived, -1), self.arrived, starts

    @cached_property
    def columns_start(self) -> torch.Tensor:
        """Where the candidates of each request begin, int32 [B + 1]."""
        batch, device = len(self.arrived), self.arrived.device
        return torch.arange(0, batch * self.candidates + 1, self.candidates, dtype=torch.int32, device=device)

    @cached_property
    def logit_rows(self) -> torch.Tensor:
        """The row, of the logits of all levels, that each candidate's children come from, int64 [B, 1 + C]; -1: none.

        Every level opens given entries: the shape depends on nothing that is drafted.
        """
        batch = len(self.arrived)
        rows = torch.full((batch, self.candidates), -1)
        opened, first, column = torch.zeros(1, dtype=torch.long), 0, 1
        for level in self.levels:
            rows[:, opened] = first + torch.arange(batch * level.rows).view(batch, -1)
            first += batch * level.rows
            if level.order is not None:
                opened = column + level.order.cpu().long()
            column += level.size
        return rows.to(self.arrived.device)


def _beam_levels(shape: Beam, device: torch.device) -> tuple[Level, ...]:
    """Below one node the best ones are its first children."""
    rows = shape.opened
    orders = [
        torch.arange(after, dtype=torch.int32, device=device) if own == 1 else None for own, after in pairwise(rows)
    ]
    nexts = [*zip(rows[1:], orders, strict=True), (0, None)]
    return tuple(
        Level(shape.children, own, after, None, order) for own, (after, order) in zip(rows, nexts, strict=True)
    )


def _rank_levels(tree: RankTree, device: torch.device) -> tuple[Level, ...]:
    """Opens the nodes that have children, in their order."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    children: dict[int, list[tuple[int, int]]] = {}  # rank and number of each child, by parent
    for number, (parent, rank) in enumerate(zip(tree.parents.tolist(), tree.ranks.tolist(), strict=True), start=1):
        children.setdefault(parent, []).append((rank, number))
    levels, opened = [], [0]
    while opened:
        own = [(row, rank, number) for row, parent in enumerate(opened) for rank, number in sorted(children[parent])]
        k = 1 + max(rank for _, rank, _ in own)
        entries = [row * k + rank for row, rank, _ in own]
        order = [entry for entry, (_, _, number) in enumerate(own) if number in children]
        whole = entries == [*range(len(opened) * k)]
        levels.append(
            Level(k, len(opened), len(order), None if whole else ints(entries), ints(order) if order else None)
        )
        opened = [own[entry][2] for entry in order]
    return tuple(levels)


def empty_rows(batch: int, width: int, words: int, device: torch.device) -> _C.BeamRows:
    """Makes room for `width` rows of each of B requests, each with `words` words of ancestor bits."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows = batch * width
    return _C.BeamRows(ints(batch, width), ints(rows), ints(rows), ints(rows, words), ints(rows, dtype=torch.int64))
