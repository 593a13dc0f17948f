"""Prompt lookup on the device: a chain per request, the tokens that followed an earlier occurrence of its last tokens.

Shapes: B requests, N nodes per tree, T columns of the history.
"""

from __future__ import annotations

import torch

from specengine import _C
from specengine.draft_trees.tree import TreeBatch


def draft_lookup(history, history_length, final_length, active, row_start, nodes: int, ngrams: tuple[int, int]):
    """Drafts a TreeBatch of N = `nodes` rows per request: the root, a drafted chain, padding. N = 1 drafts nothing.

    history: int32 [B, T], the root last.  history_length, final_length (where the request ends), active (0: idle):
    int32 [B].  row_start: int32 [B + 1], multiples of N.  ngrams: the fewest and the most tokens that are compared.
    The longest match wins, of equals the newest; behind the end of the text the draft repeats itself (Saxena 2023).
    """
    rows, device = len(active) * nodes, history.device
    tokens, parents, depths = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3))
    ancestors = torch.empty(rows, -(-nodes // 32), dtype=torch.int32, device=device)
    least, most = ngrams
    _C.draft_lookup(history, history_length, final_length, active, tokens, parents, depths, ancestors, least, most)
    return TreeBatch(tokens, parents, depths, row_start, ancestors, nodes)


def draft_lookup_reference(history, history_length, final_length, active, nodes: int, ngrams: tuple[int, int]):
    """The drafted chains, root first: a list of token ids per request; an idle one has none."""
    chains = []
    for b, length in enumerate(history_length.tolist()):
        tokens = history[b, :length].tolist()
        deepest = min(nodes - 1, int(final_length[b]) - length - 1)
        best = (0, 0)
        for end in range(1, length) if deepest > 0 else ():
            match = 0
            while match < min(ngrams[1], end) and tokens[end - 1 - match] == tokens[length - 1 - match]:
                match += 1
            if match >= ngrams[0]:
                best = max(best, (match, end))
        loop = tokens[best[1] :]
        follow = [loop[i % len(loop)] for i in range(deepest)] if best[0] else []
        chains.append([tokens[-1], *follow] if active[b] else [])
    return chains
