"""Trees that grow level by level, an op for each level (EAGLE-2 section 4.1), on the host and inside captured cycles.

Candidates are the root and, level after level, the children of the nodes that were open. Shapes: B requests, k children
of an open node at most, w open nodes of a level, C candidates, W words of ancestor bits, Vd tokens of the drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from specengine import _C
from specengine.draft_trees.shapes import BestFirst
from specengine.ops.growth.expand_levels import DepthLimits, empty_candidates, expand_levels
from specengine.ops.growth.growth_plan import GrowthPlan, empty_rows
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
    limits: how deep the trees may be.  nodes: the most of each, for BestFirst.
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
        """Adds the children of the open nodes; returns the nodes whose children come next, None after the last level.

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
        scores, beam = self._candidates.scores.cpu(), self.before.beam.cpu()  # a device's host waits for them
        return _C.another_level_pays(scores, beam, self.level, min_gain)

    @property
    def columns(self) -> Columns:
        """Tokens, parents, depths and scores of root and candidates so far, [B, 1 + C] each."""
        if self._columns is not None:
            return self._columns
        tokens, parents, depths, scores = self._candidates
        if self.first < self.plan.candidates:  # levels ended early
            tokens, parents, depths, scores = (column[:, : self.first].contiguous() for column in self._candidates)
        return tokens, parents, depths, scores
