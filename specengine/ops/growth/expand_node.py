"""Trees that grow from the likeliest node on where children depend on the path: a node of each request in every step.

Shapes: B requests, N nodes of a tree, root included, k children of a node, W words of ancestor bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C
from specengine.ops.growth.expand_levels import BEST_FIRST, KINDS, DepthLimits, empty_candidates
from specengine.ops.growth.level_trees import Columns, GrownRows
from specengine.ops.growth.top_tokens import vocabulary_parts


@dataclass(frozen=True)
class PathPlan:
    """What all trees of a batch share; made once, since captured graphs hold on to it.

    kind: `ddtree`, `jetspec` or `top2gap`.  nodes: N.  children: k.  levels: at most.  beta: of top2gap.
    row_start: int32 [B + 1].  arrived: int32 [B], zeros.
    """

    kind: str
    nodes: int
    children: int
    levels: int
    beta: float
    row_start: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def of(
        kind: str, batch: int, nodes: int, children: int, levels: int, device: torch.device, beta: float = 1.0
    ) -> PathPlan:
        """Plans trees. Raises ValueError for another kind."""
        if kind not in BEST_FIRST:
            raise ValueError(f"kind: expected one of {', '.join(BEST_FIRST)}, got {kind!r}")
        starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
        arrived = torch.zeros(batch, dtype=torch.int32, device=device)
        return PathPlan(kind, nodes, children, levels, beta, starts, arrived)

    @property
    def steps(self) -> int:
        """How many steps complete every tree: nodes that may have to be opened, the root among them."""
        most = self.nodes - 1
        return max(1, -(-most // self.children) if self.kind == "jetspec" else most)


class PathTrees:
    """Holds B trees while they grow, a step for each opened node; nothing is read by the host.

    roots: int32 [B, 1].  known: int32 [B], 0: nothing is drafted for the request.
    token_ids: int32 [Vd], the target's tokens; None: the drafter's are the same.
    """

    def __init__(
        self,
        plan: PathPlan,
        roots: torch.Tensor,
        known: torch.Tensor,
        token_ids: torch.Tensor | None = None,
        limits: DepthLimits | None = None,
    ) -> None:
        self._plan, self._step = plan, 0
        self._given = (token_ids, roots, known, (limits or DepthLimits()).record)
        self._candidates = empty_candidates(len(roots), plan.nodes, roots.device)
        self._nodes: _C.OpenedNodes | None = None

    def expand(
        self, logits: torch.Tensor, delta: torch.Tensor | None = None, confidence: torch.Tensor | None = None
    ) -> GrownRows | None:
        """Adds to each tree what the children of its opened node allow; returns the row of the node to open next.

        Row b is that of request b, with depth -1 once its tree is complete; `above` is the row of its parent among all
        steps' rows, B of each step. None after the last step.
        logits: float32 [B, Vd], of the rows before; at first of the roots.  delta: float32 [B, Vd], added to them.
        confidence: float32 [B], the logit of the chance that the first child is accepted: the columns' scores are then
        logarithms of chances; the order of nodes is that of log-probabilities.
        Raises ValueError for sizes that do not fit and, on the CPU, for logits that are no distribution (NaN, say); on
        CUDA such a node has no children.
        """
        plan, step, (batch, vocab) = self._plan, self._step, logits.shape
        if self._nodes is None:
            self._nodes = self._empty_nodes(confidence is not None)
        after = _rows(batch, -(-(plan.steps + 1) // 32), logits.device)
        level = _C.LevelLogits(logits, delta, confidence)
        parts = vocabulary_parts(batch, vocab, plan.children, plan.arrived)
        _C.expand_node(
            *(level, parts, self._nodes, *self._given, self._candidates, after),
            *(KINDS.index(plan.kind), plan.levels, step, plan.beta),
        )
        self._step += 1
        if self._step == plan.steps:
            return None
        place = (plan.row_start, after.ancestors, after.above)
        return GrownRows(after.tokens, after.depths, *place, self._step, False)

    @property
    def columns(self) -> Columns:
        """Tokens, parents, depths and scores of root and nodes, [B, N] each, -1 where there is no node."""
        tokens, parents, depths, scores = self._candidates
        return tokens, parents, depths, scores

    def _empty_nodes(self, confident: bool) -> _C.OpenedNodes:
        tokens = self._candidates.tokens
        size, device, k = tokens.shape, tokens.device, self._plan.children

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        confidences = room(*size, dtype=torch.float32) if confident else None
        lists = room(*size, k), room(*size, k, dtype=torch.float32), confidences
        scores, counts, opened = room(*size, dtype=torch.float64), room(size[0]), room(size[0])
        return _C.OpenedNodes(*lists, *(room(*size) for _ in range(3)), scores, counts, opened)


def _rows(batch: int, words: int, device: torch.device) -> _C.BeamRows:
    beam, tokens, depths, bits = (
        torch.empty(shape, dtype=torch.int32, device=device) for shape in ((batch, 1), batch, batch, (batch, words))
    )
    return _C.BeamRows(beam, tokens, depths, bits, torch.empty(batch, dtype=torch.int64, device=device))
