"""The tokens that a drafter has not cached, between captured cycles, as the rows of its next pass; CUDA only.

Shapes: B requests, N rows of each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specengine import _C
from specengine.draft_trees.tree import TreeBatch
from specengine.ops.sampling_table import TokenHistory


class TextRows(NamedTuple):
    """Unread tokens as chains, padded to N rows each.

    seen: the target's keys that each row sees.  last: int64 [B * (1 + masks)], the rows of each request's last token
    and of its mask tokens.
    roots: int32 [B, 1], the last committed tokens.  running, first, root_positions, last_seen: int32 [B], whether the
    request runs, where its rows begin, the position of its root, and the target's slot that drafted rows see last.
    """

    rows: TreeBatch
    seen: _C.SeenKeys
    last: torch.Tensor
    roots: torch.Tensor
    running: torch.Tensor
    first: torch.Tensor
    root_positions: torch.Tensor
    last_seen: torch.Tensor


def text_rows(
    history: TokenHistory,
    active: torch.Tensor,
    block_table: torch.Tensor,
    first: torch.Tensor,
    row_start: torch.Tensor,
    rows: int,
    unread: int,
    block: int = 1,
    masks: int = 0,
    mask_token: int = 0,
) -> TextRows:
    """Lays out the tokens of every running request from position `first` on, and counts all but the root as read.

    active: int32 [B], 0: idle; a request of one token does not run either.  block_table: int32 [B, P], of the target.
    first: int32 [B], written.  row_start: int32 [B + 1], multiples of N = `rows`.  unread: tokens at the end that are
    left out.  block: tokens of a block; a row sees the target's keys of the blocks before its own.
    masks: rows of `mask_token` behind a running request's last token, as far as there is room.
    """
    batch, count, device = len(active), len(active) * rows, active.device

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    chains = _C.ChainColumns(ints(count), ints(count), ints(count), ints(count, -(-rows // 32)))
    seen = _C.SeenKeys(ints(count), ints(count, block_table.shape[1]), ints(count, 1), block)
    last, counts = torch.empty(batch, 1 + masks, dtype=torch.int64, device=device), ints(5, batch)
    text = (history.tokens, history.length, active, block_table, first)
    _C.text_rows(*text, chains, seen, last, counts, unread, masks, mask_token)
    tree = TreeBatch(chains.tokens, chains.parents, chains.depths, row_start, chains.ancestors, rows)
    *known, roots = counts
    return TextRows(tree, seen, last.view(-1), roots[:, None], *known)
