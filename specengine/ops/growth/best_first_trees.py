"""Trees that grow from the likeliest node on, where children depend on the path: a node of each request a step.

Shapes: as in growing_trees.py; N nodes of a tree, root included.
"""

from __future__ import annotations

from functools import cached_property

import torch

from specengine import _C
from specengine.draft_trees.shapes import BestFirst
from specengine.ops.growth.expand_levels import DepthLimits, empty_candidates
from specengine.ops.growth.growing_trees import Children, GrowingTrees, GrownRows, Logits
from specengine.ops.growth.growth_plan import empty_rows
from specengine.ops.growth.top_tokens import vocabulary_parts
from specengine.utils.host_memory import is_host


class BestFirstTrees(GrowingTrees):
    """Holds B trees while they grow; those whose levels are all known at once grow whole, as GrowingTrees do."""

    def add(self, found: Logits | Children) -> GrownRows | None:
        """Adds children of the nodes that the step before has opened; returns the nodes that are opened next."""
        if isinstance(found, Logits):
            return super().add(found)
        # As logits of B * k columns, of which each request has k.
        tokens = found.tokens if self._token_ids is None else self._token_ids[found.tokens.long()]
        batch, count = tokens.shape
        logits = found.scores.new_full((batch, batch, count), -torch.inf)
        logits.diagonal().copy_(found.scores.T)
        return self._open_next(Logits(logits.flatten(1)), tokens.flatten())

    def _expand(self, found: Logits) -> GrownRows | None:
        return self._open_next(found, self._token_ids)

    def _open_next(self, found: Logits, token_ids: torch.Tensor | None) -> GrownRows | None:
        shape, limits, (batch, vocab) = self._shape, self._limits or DepthLimits(), found.values.shape
        if self.level == 0:
            self._opened = self._room(shape.children, found.confidence is not None)
        whole = self.plan.level_shape
        assert whole is not None  # of each shape that is best first
        after = empty_rows(batch, 1, -(-(1 + self._steps) // 32), self._known.device)
        _C.expand_node(
            _C.LevelLogits(found.values, found.delta, found.confidence, None, None),
            vocabulary_parts(batch, vocab, shape.children, self.plan.arrived),
            *(self._opened, token_ids, self._roots, self._known, limits.record, self._candidates, after),
            *(whole.record, shape.levels, self.level),
        )
        self.level += 1
        if self.level == self._steps or (is_host(after.beam.device) and bool((after.beam < 0).all())):
            return None  # on a device nobody knows whether all trees are complete
        place = (after.above, self.level, False, self.level, after.beam)
        return GrownRows(after.tokens, after.depths, self.plan.row_starts[1], after.ancestors, *place, by_node=True)

    @property
    def _shape(self) -> BestFirst:
        assert isinstance(self.plan.shape, BestFirst)
        return self.plan.shape

    @cached_property
    def _candidates(self) -> _C.CandidateColumns:
        nodes = min(self._shape.nodes, self._nodes or self._shape.nodes)
        return empty_candidates(len(self._known), nodes, self._known.device)

    @cached_property
    def _steps(self) -> int:
        """How many steps complete every tree: nodes that may have to be opened, the root among them."""
        below = self._candidates.tokens.shape[1] - 1
        return max(1, -(-below // self._shape.children) if self._shape.kind == "jetspec" else below)

    def _room(self, children: int, confidence: bool) -> _C.OpenedNodes:
        """Makes room for what the op keeps between two steps."""
        size, device = self._candidates.tokens.shape, self._known.device

        def ints(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        tokens, scores = ints(*size, children), torch.empty(size, dtype=torch.float64, device=device)
        log_probs = torch.empty(*size, children, device=device)
        confidences = torch.empty(size, device=device) if confidence else None
        lists = (tokens, log_probs, confidences, ints(*size), ints(*size), ints(*size), scores)
        return _C.OpenedNodes(*lists, ints(size[0]), ints(size[0]))

    def pays(self, min_gain: float) -> bool:
        """Returns true: a tree grows until it has its nodes."""
        return True
