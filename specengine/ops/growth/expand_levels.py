"""Whole trees from the distributions of all their levels, which are known at once, in one launch on CUDA.

Shapes: B requests, T levels, k children of a node, N nodes below the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from specengine import _C
from specengine.draft_trees.rank_paths import RankTree
from specengine.ops.growth.top_tokens import vocabulary_parts
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.select_nodes import Columns

KINDS = ("ranks", "backbone", "ddtree", "jetspec", "top2gap")
BEST_FIRST = KINDS[2:]


@dataclass(frozen=True)
class LevelShape:
    """What a tree is whose levels are known at once; made once per device, since captured graphs hold on to it.

    children: k, of every list.  nodes: of the largest tree, root included.
    """

    children: int
    nodes: int
    record: _C.LevelShape

    @staticmethod
    def ranks(tree: RankTree, device: torch.device) -> LevelShape:
        """Takes a tree whose nodes lie level by level: each is the child of some rank of its level's list."""
        columns = (tree.ranks, tree.parents, tree.depths)
        ranks, parents, depths = (torch.tensor(each.tolist(), dtype=torch.int32, device=device) for each in columns)
        record = _C.LevelShape(0, ranks, parents, depths, None, None, 0.0)
        return LevelShape(1 + int(tree.ranks.max()), 1 + len(tree), record)

    @staticmethod
    def backbone(
        levels: int, widths: Sequence[int], thresholds: Sequence[float] = (), device: torch.device | str = "cpu"
    ) -> LevelShape:
        """Attaches each level's tokens to the level before's likeliest one, as expand_backbone does."""
        settings = (
            torch.tensor(list(thresholds), dtype=torch.float32, device=device),
            torch.tensor(list(widths), dtype=torch.int32, device=device),
        )
        widest = max(widths, default=0)
        return LevelShape(widest, 1 + levels * widest, _C.LevelShape(1, None, None, None, *settings, 0.0))

    @staticmethod
    def best_first(kind: str, nodes: int, children: int, beta: float = 1.0) -> LevelShape:
        """Grows from the likeliest node on: kind `ddtree`, `jetspec` or `top2gap` (beta: how fast children get fewer).

        Raises ValueError for another kind.
        """
        if kind not in BEST_FIRST:
            raise ValueError(f"kind: expected one of {', '.join(BEST_FIRST)}, got {kind!r}")
        return LevelShape(children, nodes, _C.LevelShape(KINDS.index(kind), None, None, None, None, None, beta))


@dataclass(frozen=True)
class DepthLimits:
    """How deep the trees of B requests may be; what is None limits nothing.

    limits: int32 [B], deepest level.  history_length, final_length: int32 [B], of the text, and where the request ends:
    a tree has no level that could not be committed.  active: int32 [B], 0: idle.
    """

    limits: torch.Tensor | None = None
    history_length: torch.Tensor | None = None
    final_length: torch.Tensor | None = None
    active: torch.Tensor | None = None

    @property
    def record(self) -> _C.DepthLimits:
        """As ops take it."""
        return _C.DepthLimits(self.limits, self.history_length, self.final_length, self.active)


def empty_candidates(batch: int, columns: int, device: torch.device) -> _C.CandidateColumns:
    """Makes room for candidates [B, columns], the root included."""
    tokens, parents, depths = (torch.empty(batch, columns, dtype=torch.int32, device=device) for _ in range(3))
    return _C.CandidateColumns(tokens, parents, depths, torch.empty(batch, columns, device=device))


def expand_levels(
    logits: torch.Tensor,
    shape: LevelShape,
    roots: torch.Tensor | TokenHistory,
    known: torch.Tensor,
    arrived: torch.Tensor,
    *,
    levels: int,
    by_request: bool,
    nodes: int | None = None,
    token_ids: torch.Tensor | None = None,
    limits: DepthLimits | None = None,
) -> Columns:
    """Returns tokens, parents, depths and scores of root and nodes, [B, 1 + N] each, -1 where there is no node.

    logits: float32 [B * T, Vd], row b * T + level if by_request, else row level * B + b.  levels: T.
    roots: int32 [B, 1], or the texts whose last tokens they are.  known: int32 [B], 0: the request drafts nothing.
    arrived: int32 [B or more], zeros before and after, which launches in sequence share.
    nodes: columns, of a tree that grows from the likeliest node on; None: as many as the shape has.
    token_ids: int32 [Vd], the target's tokens; None: the drafter's are the same.
    Raises ValueError for sizes that do not fit and, on the CPU, for logits that are no distribution (NaN, say); on CUDA
    a request with such logits has its root alone.
    """
    limits, history, last = limits or DepthLimits(), None, None
    if isinstance(roots, TokenHistory):
        limits, history = replace(limits, history_length=roots.length), roots.tokens
    else:
        last = roots
    candidates = empty_candidates(len(known), nodes or shape.nodes, logits.device)
    parts = vocabulary_parts(len(logits), logits.shape[1], shape.children, arrived)
    grown = (token_ids, last, history, known, limits.record, candidates, levels, by_request)
    _C.expand_levels(logits, shape.record, parts, *grown)
    tokens, parents, depths, scores = candidates
    return tokens, parents, depths, scores
