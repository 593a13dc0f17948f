"""Drafting by sampling: draws the children of tree nodes from the drafter's distributions.

Shapes: R rows, C columns of the drafter's vocabulary, V of the target's, K siblings.
"""

from __future__ import annotations

import torch

from specengine import _C
from specengine.draft_trees.tree import TreeBatch
from specengine.ops import noise
from specengine.ops.row_tools import zero_rows
from specengine.ops.sampling_table import SamplingTable, TokenHistory, sampled_trees
from specengine.ops.target_distribution import target_probs_reference


def draw_siblings(
    logits: torch.Tensor,
    nodes: torch.Tensor,
    tree: TreeBatch,
    requests: torch.Tensor,
    params: SamplingTable,
    history: TokenHistory,
    count: int,
    replacement: bool,
    index: torch.Tensor | None = None,
    as_match: bool = False,
) -> torch.Tensor:
    """Draws children: tokens int32 [R, K] in the order of drawing; -1 if a distribution has no further token.

    logits: float32 [R, C], row r for the children of node nodes[r] of request requests[r] (int32 [R] each); the
    sampling parameters shape them as they shape the target's rows.  tree: as far as it has grown.  count: K.
    replacement: whether a token may be drawn twice.  index: int32 [V], see DraftLogits.
    The noise is keyed by (seed, position of the root, node, sibling, token), in a stream of its own.
    as_match: uses the noise of rule `match` instead. The first sibling is then the token that `match` would draw from
    such logits of the target, and each further one the token it would draw without the siblings before.
    Raises ValueError for NaN or infinite scores, and for as_match with replacement.
    """
    rows, vocab, device = len(logits), logits.shape[1] if index is None else len(index), logits.device
    drawn = torch.empty(rows, count, dtype=torch.int32, device=device)
    _C.draw_siblings(
        logits,
        requests,
        nodes,
        index,
        sampled_trees(tree, params, history),
        drawn,
        zero_rows(rows, vocab, device).view(torch.float32),
        zero_rows(rows, vocab, device),
        torch.empty(rows, vocab, dtype=torch.int64, device=device),
        replacement,
        as_match,
    )
    return drawn


def draw_siblings_reference(
    logits, nodes, tree, requests, params, history, count, replacement, index=None, as_match=False
) -> torch.Tensor:
    drawn = torch.full((len(logits), count), -1, dtype=torch.int32)
    for r, (b, node) in enumerate(zip(requests.tolist(), nodes.tolist(), strict=True)):
        first, length = int(tree.row_start[b]), int(history.length[b])
        path: list[int] = []
        at = node
        while at > 0:
            path.insert(0, int(tree.tokens[first + at]))
            at = int(tree.parents[first + at])
        row = logits[r].double()
        if index is not None:
            row = torch.where(index < 0, -torch.inf, row[index.clamp(min=0).long()])
        tokens = [*history.tokens[b, :length].tolist(), *path]
        probs = target_probs_reference(row, params, b, tokens, int(history.prompt_length[b]))
        for i in range(count):
            if probs.sum() == 0:
                break
            own = {"position": length - 1, "streams": noise.DRAFT_STREAMS, "salt": node << 16 | i}
            which = {"position": len(tokens)} if as_match else own
            drawn[r, i] = token = noise.draw(probs, seed=int(params.seed[b]), **which)
            if not replacement:
                probs[token] = 0
    return drawn
