"""Drafting by sampling: draws the children of tree nodes from the drafter's distributions.

Shapes: R rows, C columns of the drafter's vocabulary, V of the target's, K siblings.
"""

from __future__ import annotations

import torch

from specengine import _C
from specengine.ops.row_tools import zero_rows
from specengine.ops.verify_tree import SamplingTable, TokenHistory
from specengine.tree import TreeBatch


def draw_siblings(
    logits: torch.Tensor,
    nodes: torch.Tensor,
    tree: TreeBatch,
    sequences: torch.Tensor,
    params: SamplingTable,
    history: TokenHistory,
    count: int,
    replacement: bool,
    index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Tokens int32 [R, K], in the order they were drawn; -1 where a distribution has no further token.

    logits: float32 [R, C], row r for the children of node nodes[r] of sequence sequences[r] (int32 [R] each), shaped by
    the sampling parameters as the target's rows are.  tree: as far as it has grown.  count: K.  replacement: whether a
    token may be drawn twice.  index: int32 [V], see DraftLogits. The noise is keyed by (seed, position of the root,
    node, sibling, token) in a stream of its own. Raises ValueError for NaN or infinite scores.
    """
    rows, vocab, device = len(logits), logits.shape[1] if index is None else len(index), logits.device
    drawn = torch.empty(rows, count, dtype=torch.int32, device=device)
    _C.draw_siblings(
        *(logits, sequences, nodes, index, tree.tokens, tree.parents, tree.row_start),
        *(params.columns(), history.columns()),
        drawn,
        zero_rows(rows, vocab, device).view(torch.float32),
        zero_rows(rows, vocab, device),
        torch.empty(rows, vocab, dtype=torch.int64, device=device),
        replacement,
    )
    return drawn
