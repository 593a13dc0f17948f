"""The candidates of trees whose shape is known before their tokens, inside captured cycles; CUDA only.

Each node is the child of some rank, of a distribution that its level alone decides: Medusa's trees, chains of PARD and
DFlash.
"""

from __future__ import annotations

import torch

from specengine import _C
from specengine.draft_trees.rank_paths import RankColumns
from specengine.ops.growth.level_trees import Likeliest
from specengine.ops.sampling_table import TokenHistory


def fill_ranks(
    best: Likeliest, token_ids: torch.Tensor | None, nodes: RankColumns, history: TokenHistory, *, by_request: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens, parents, depths and scores of root and candidates, [B, 1 + N] each, for select_nodes.

    best: the children of every level and request: row b * levels + level if by_request, else row level * B + b.
    token_ids: int32 [Vd], the target's tokens; None: the drafter's are the same.
    """
    batch, device = len(history.length), best.tokens.device
    levels, shape = len(best.tokens) // batch, (batch, 1 + len(nodes.ranks))
    tokens, parents, depths = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(3))
    found = _C.CandidateColumns(tokens, parents, depths, torch.empty(shape, device=device))
    _C.fill_ranks(
        best.tokens, best.scores, token_ids, *nodes, history.tokens, history.length, found, levels, by_request
    )
    return tokens, parents, depths, found.scores
