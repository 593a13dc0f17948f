"""The pairs of hidden state and token that wait for a drafter between captured cycles; CUDA only.

Shapes: B requests, N rows of each, C floats of a position's hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specengine import _C
from specengine.draft_trees.tree import TreeBatch
from specengine.ops.sampling_table import TokenHistory
from specengine.ops.verify_tree import Accepted


class WaitingRows(NamedTuple):
    """Waiting pairs as chains, padded to N rows each.

    last: int64 [B * (1 + masks)], the rows of each request's last pair and of its masks.
    above: int64 [B * N], the hidden state of each row, out of N - masks of each request and, after them all, that of
    masks; None: without masks.
    roots: int32 [B, 1], the last committed tokens.
    last_pairs, next_pairs: int32 [B], the number of each request's last pair, and of the next one.
    """

    rows: TreeBatch
    last: torch.Tensor
    above: torch.Tensor | None
    roots: torch.Tensor
    last_pairs: torch.Tensor
    next_pairs: torch.Tensor


@dataclass(frozen=True)
class Masks:
    """Rows of a mask token, `count` of them after the last pair of each request."""

    token: int
    count: int


def pair_rows(
    history: TokenHistory,
    counts: torch.Tensor,
    first: torch.Tensor,
    row_start: torch.Tensor,
    rows: int,
    unread: int,
    blocks: torch.Tensor | None = None,
    masks: Masks | None = None,
) -> WaitingRows:
    """Lays out the first pairs of every request; pair i has the token of position first + i + 1.

    counts, first: int32 [B], how many pairs wait, and the number of the first one; a request without any is padding.
    row_start: int32 [B + 1], multiples of N = `rows`.  unread: pairs at the end that are left out.
    blocks: int32 [B, S], whose first column becomes the last committed tokens.  masks: after N - count pairs at most.
    """
    batch, device = len(counts), counts.device
    tokens, parents, depths = (torch.empty(batch * rows, dtype=torch.int32, device=device) for _ in range(3))
    ancestors = torch.empty(batch * rows, -(-rows // 32), dtype=torch.int32, device=device)
    token, behind = (masks.token, masks.count) if masks else (0, 0)
    last = torch.empty(batch, 1 + behind, dtype=torch.int64, device=device)
    above = torch.empty(batch * rows, dtype=torch.int64, device=device) if masks else None
    ends = torch.empty(3, batch, dtype=torch.int32, device=device)
    chains = _C.ChainColumns(tokens, parents, depths, ancestors)
    written = (chains, last, ends, above, blocks)
    _C.pair_rows(history.tokens, history.length, counts, first, *written, unread, behind, token)
    last_pairs, next_pairs, roots = ends
    laid = TreeBatch(tokens, parents, depths, row_start, ancestors, rows)
    return WaitingRows(laid, last.view(-1), above, roots[:, None], last_pairs, next_pairs)


def keep_pairs(
    hidden_states: torch.Tensor,
    row_start: torch.Tensor,
    accepted: Accepted,
    history: TokenHistory,
    kept: torch.Tensor,
    counts: torch.Tensor,
    first: torch.Tensor,
    *,
    add: bool,
) -> None:
    """Keeps the hidden states of the tokens that a cycle committed.

    hidden_states: floats [M, C], of all rows of the cycle.  row_start: int32 [B + 1].  history: after the commit.
    kept: [slots, R, C] of floats, written, rounded to its dtype.  counts, first: int32 [slots], written.
    add: pairs come behind those that wait; otherwise none waits.
    """
    paths = (accepted.path, accepted.path_length)
    _C.keep_pairs(hidden_states, row_start, *paths, history.length, kept, counts, first, add)


def keep_last(
    hidden_states: torch.Tensor, row_start: torch.Tensor, accepted: Accepted, kept: torch.Tensor, known: torch.Tensor
) -> None:
    """Keeps the hidden state of the last node that each request committed.

    hidden_states: floats [M, C], of all rows of the cycle.  row_start: int32 [B + 1].  kept: float32 [slots, C],
    written.  known: int32 [slots], written: 1, or 0 for a request that committed nothing.
    """
    _C.keep_last(hidden_states, row_start, accepted.path, accepted.path_length, kept, known)
