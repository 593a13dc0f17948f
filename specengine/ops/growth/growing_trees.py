"""Trees that grow level by level, an op for each level (EAGLE-2 section 4.1), on the host and inside captured cycles.

Candidates are the root and, level after level, the children of the nodes that were open. Shapes: B requests, k children
of an open node at most, w open nodes of a level, C candidates, W words of ancestor bits, Vd tokens of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import NamedTuple

import torch

from specengine import _C
from specengine.draft_trees.rank_paths import RankColumns, RankTree
from specengine.draft_trees.shapes import Beam, BestFirst, Ranks, Shape
from specengine.ops.growth.expand_levels import DepthLimits, LevelShape, empty_candidates, expand_levels
from specengine.ops.growth.top_tokens import vocabulary_parts
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.select_nodes import Columns
from specengine.utils.host_memory import is_host


@dataclass(frozen=True)
class Logits:
    """The logits of the children of open nodes.

    values: float32 [B * w, Vd], of each of these nodes, or [B, Vd], where those of a request share them. Of several
    levels, which know nothing of the tokens above them: [B * levels, Vd] by request, or [levels * B, Vd].
    delta: float32 [B * w, Vd], added to them.  confidence: float32 [B * w] or [B], the logit of the chance that the
    first child is accepted; scores are then logarithms of chances: the others share the rest.
    """

    values: torch.Tensor
    delta: torch.Tensor | None = None
    confidence: torch.Tensor | None = None
    levels: int = 1
    by_request: bool = True

    def level(self, level: int) -> Logits:
        """Returns those of one level, [B, Vd]."""
        if self.levels == 1:
            return self
        batch = len(self.values) // self.levels
        if self.by_request:
            return Logits(self.values.view(batch, self.levels, -1)[:, level].contiguous())
        return Logits(self.values[level * batch : (level + 1) * batch])


@dataclass(frozen=True)
class Children:
    """The children of open nodes, where a network knows them.

    tokens: int32 [B * w, k] or [B, k], the drafter's, likeliest first; -1: there is none.  scores: float32, as many,
    their log-probabilities.  There may be more than a shape takes.
    """

    tokens: torch.Tensor
    scores: torch.Tensor


class Level(NamedTuple):
    """How a level grows. children: k.  rows: w.  next: nodes that are opened behind it, 0 behind the last level.

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
    def best_first(self) -> LevelShape:
        """The shape of trees that grow from the likeliest node on."""
        assert isinstance(self.shape, BestFirst)
        return LevelShape.best_first(self.shape.kind, self.shape.nodes, self.shape.children, self.shape.beta)

    @cached_property
    def level_shape(self) -> LevelShape | None:
        """The shape of trees that grow in one launch, where all levels are known at once; None: they grow by levels."""
        shape, device = self.shape, self.arrived.device
        if isinstance(shape, BestFirst):
            return LevelShape.best_first(shape.kind, shape.nodes, shape.children, shape.beta)
        if isinstance(shape, Ranks) and not shape.widths:
            tree = shape.tree.first(len(shape.tree), shape.levels)  # level by level
            columns = (tree.ranks, tree.parents, tree.depths)
            tensors = (torch.tensor(each.tolist(), dtype=torch.int32, device=device) for each in columns)
            return LevelShape.ranks(RankColumns(*tensors), shape.children)
        if isinstance(shape, Ranks) or max(shape.opened) > 1:
            return None
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


@dataclass(frozen=True)
class GrownRows:
    """The rows of a level's open nodes, as those of a TreeBatch.

    above: int64 [B * w], the rows of their parents in the level before.  first_node: their first number.
    in_place: whether each row continues the row of its number.  level: from 1.
    by_node: a node of each request, of any level; above: the rows of their parents among those of all steps before.
    """

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor
    above: torch.Tensor
    first_node: int
    in_place: bool
    level: int
    beam: torch.Tensor  # int32 [B, w], their columns
    by_node: bool = False


class GrowingTrees:
    """Holds the candidates of B trees while they grow; on a device, nothing is read by the host.

    roots: int32 [B, 1], or the texts whose last tokens they are.  known: int32 [B], 0: nothing is drafted for the
    request.  token_ids: int32 [Vd], the target's tokens; None: the drafter's are the same.
    limits: how deep the trees may be.  nodes: of each at most, of a shape that grows from the likeliest node on.
    origin: int64 [B], the rows that the first level's `above` names for the roots; None: 0 to B - 1.
    """

    def __init__(
        self,
        plan: GrowthPlan,
        roots: torch.Tensor | TokenHistory,
        known: torch.Tensor,
        token_ids: torch.Tensor | None,
        *,
        limits: DepthLimits | None = None,
        nodes: int | None = None,
        origin: torch.Tensor | None = None,
    ) -> None:
        self.plan, self._texts_or_roots, self._known, self._token_ids = plan, roots, known, token_ids
        self._limits, self._nodes, self._origin = limits, nodes, origin
        self._columns: Columns | None = None  # of whole trees
        self.before, self.level = plan.root, 0
        self.first = self._first_node = 1

    @cached_property
    def _roots(self) -> torch.Tensor:
        roots = self._texts_or_roots
        return roots.last if isinstance(roots, TokenHistory) else roots

    @cached_property
    def _candidates(self) -> _C.CandidateColumns:
        return empty_candidates(len(self._known), self.plan.candidates, self._known.device)

    def add(self, found: Logits | Children) -> GrownRows | None:
        """Adds the children of the open nodes; returns the nodes whose children come next, None behind the last level.

        Levels whose logits are known together are added together, in one launch if the shape allows it.
        """
        if isinstance(found, Children):
            count = self.plan.levels[self.level].children
            tokens, scores = (each[:, :count].contiguous() for each in (found.tokens, found.scores))
            return self._add_children(tokens, scores, self._token_ids)
        if self._grows_whole(found):
            self._columns = self._whole(found)
            return None
        rows = self._expand(found.level(0))
        for level in range(1, min(found.levels, len(self.plan.levels))):
            rows = self._expand(found.level(level))
        return rows

    def _grows_whole(self, found: Logits) -> bool:
        """Returns whether these logits are all that the trees are made of."""
        alone = found.delta is None and found.confidence is None
        return alone and found.levels == self.plan.shape.levels and self.plan.level_shape is not None

    def _whole(self, found: Logits) -> Columns:
        """Grows trees whose levels are all known."""
        assert self.plan.level_shape is not None  # see _grows_whole
        return expand_levels(
            found.values,
            self.plan.level_shape,
            self._texts_or_roots,
            self._known,
            self.plan.arrived,
            levels=found.levels,
            by_request=found.by_request,
            nodes=self._nodes if isinstance(self.plan.shape, BestFirst) else None,
            token_ids=self._token_ids,
            limits=self._limits,
        )

    def _expand(self, found: Logits) -> GrownRows | None:
        """Adds the likeliest children of each open node, in one launch."""
        level, (_, vocabulary) = self.plan.levels[self.level], found.values.shape
        room = vocabulary_parts(self.before.beam.numel(), vocabulary, level.children, self.plan.arrived)
        logits = _C.LevelLogits(found.values, found.delta, found.confidence, *(self.plan.cape or (None, None)))
        return self._add_level(partial(_C.expand_level, logits, room), self._token_ids)

    def _add_children(
        self, tokens: torch.Tensor, scores: torch.Tensor, token_ids: torch.Tensor | None
    ) -> GrownRows | None:
        """Adds children that are known, as those of Children. token_ids: the target's tokens of theirs."""
        return self._add_level(partial(_C.grow_level, tokens, scores), token_ids)

    def _add_level(self, write: Callable[..., None], token_ids: torch.Tensor | None) -> GrownRows | None:
        """Adds a level by an op that gets all but its children. token_ids: the target's tokens of the children's."""
        level, before = self.plan.levels[self.level], self.before
        after = empty_rows(len(self._roots), level.next, before.ancestors.shape[1], self._roots.device)
        origin = self._origin if self.level == 0 else None
        entries = _C.LevelEntries(level.order, level.entries)
        place = (self._roots, self._known, self._candidates, before, after, origin, self.first, self._first_node)
        write(token_ids, entries, *place)
        first_node = self._first_node
        self.first += level.size
        self._first_node += level.next
        self.before, self.level = after, self.level + 1
        if not level.next or (is_host(after.depths.device) and after.depths.numpy().max() <= 0):
            return None  # the CPU gets rows of depth 0 in place of nodes that do not exist
        in_place = origin is None and level.rows == level.next == 1
        start = self.plan.row_starts[level.next]
        others = (after.above, first_node, in_place, self.level, after.beam)
        return GrownRows(after.tokens, after.depths, start, after.ancestors, *others)

    def pays(self, min_gain: float) -> bool:
        """Returns whether one more level is expected to add `min_gain` tokens, the sum over the requests."""
        return _C.another_level_pays(self._candidates.scores, self.before.beam, self.level, min_gain)

    @property
    def columns(self) -> Columns:
        """Tokens, parents, depths and scores of root and candidates so far, [B, 1 + C] each."""
        if self._columns is not None:
            return self._columns
        tokens, parents, depths, scores = self._candidates
        if self.first < self.plan.candidates:  # levels ended early
            tokens, parents, depths, scores = (column[:, : self.first].contiguous() for column in self._candidates)
        return tokens, parents, depths, scores


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
    """Makes room for `width` rows of each of B requests. words: of ancestor bits."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows = batch * width
    return _C.BeamRows(ints(batch, width), ints(rows), ints(rows), ints(rows, words), ints(rows, dtype=torch.int64))
