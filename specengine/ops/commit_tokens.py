"""Acceptance on the device: appends accepted tokens to the histories and writes a record of the cycle for the host.

Shapes: B requests, N nodes per tree, T columns of the history, E end-of-text tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C
from specengine.draft_trees.tree import TreeBatch
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.verify_tree import Accepted

RECORD_HEAD = 4  # numbers in front of the path


@dataclass(frozen=True)
class Limits:
    """The conditions that end a request.

    eos: int32 [E].  ignores_eos: int32 [B].  final_length: int32 [B], of the history.  active: int32 [B], 0 once the
    request ended.
    """

    eos: torch.Tensor
    ignores_eos: torch.Tensor
    final_length: torch.Tensor
    active: torch.Tensor


def record_width(nodes: int) -> int:
    """Columns of a record: tokens kept, path length, bonus token, relaxed; path, tokens and parents of the tree."""
    return RECORD_HEAD + 3 * nodes


def commit_tokens(
    tree: TreeBatch, accepted: Accepted, history: TokenHistory, cached: torch.Tensor, limits: Limits, record
) -> None:
    """Appends every running request's accepted tokens and bonus token to its history, cut where it ends.

    Writes history, accepted.path_length (tokens kept, 0 for an idle request), limits.active,
    cached: int32 [B], tokens of the cache, advanced by those kept, and record: int32 [B, record_width(N)].
    """
    _C.commit_tokens(
        tree.tokens,
        tree.parents,
        accepted.native,
        limits.eos,
        limits.ignores_eos,
        limits.final_length,
        history.tokens,
        history.length,
        cached,
        limits.active,
        record,
    )


def commit_tokens_reference(
    tree: TreeBatch, accepted: Accepted, history: TokenHistory, cached: torch.Tensor, limits: Limits, record
) -> None:
    nodes = accepted.path.shape[1]
    for b in range(len(accepted.bonus)):
        rows = slice(b * nodes, (b + 1) * nodes)
        tokens, active = tree.tokens[rows].tolist(), bool(limits.active[b])
        path = accepted.path[b].tolist()
        count = int(accepted.path_length[b]) if active else 0
        bonus = int(accepted.bonus[b]) if active else -1
        run = [*(tokens[node] for node in path[1:count]), bonus] if bonus >= 0 else []
        length, kept, ended = int(history.length[b]), 0, bonus < 0
        for token in run:
            history.tokens[b, length + kept] = token
            kept += 1
            ended = length + kept >= int(limits.final_length[b])
            ended = ended or (not limits.ignores_eos[b] and token in limits.eos.tolist())
            if ended:
                break
        relaxed = int(accepted.relaxed[b]) if active else 0
        record[b] = torch.tensor([kept, count, bonus, relaxed, *path, *tokens, *tree.parents[rows].tolist()])
        accepted.path_length[b] = kept
        if active:
            history.length[b] += kept
            cached[b] += kept
            limits.active[b] = not ended
