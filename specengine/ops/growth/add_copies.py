"""Copies of earlier text among the candidates of a network, inside captured cycles; CUDA only.

Shapes: B requests, M candidates, L tokens of a copy, T columns of the history.
"""

from __future__ import annotations

import torch

from specengine import _C
from specengine.ops.select_nodes import Columns

CLASSES = 5  # of a match's length: 1, 2-3, 4-7, 8-15, 16 or more tokens
LONGEST = 64  # tokens of a copy


def add_copies(
    columns: Columns,
    known: torch.Tensor,
    history: torch.Tensor,
    history_length: torch.Tensor,
    active: torch.Tensor,
    chances: torch.Tensor,
    length: int,
    ngrams: tuple[int, int],
) -> tuple[Columns, torch.Tensor]:
    """Joins candidates with the chain of ops.draft_lookup; returns columns [B, M + L] and which requests have any.

    columns: of candidates, as select_nodes takes them; those on the chain get the higher of both scores.  known: int32
    [B], 0: its candidates are left out.  history: int32 [B, T].  history_length, active: int32 [B].  chances: float32
    [CLASSES], log-probabilities of a chain's node, by the length of the match before it.  length: L.  ngrams: the
    fewest and the most tokens that are compared.
    Raises ValueError for a copy of more than LONGEST tokens, and for more than MAX_CANDIDATES columns.
    """
    batch, candidates = columns[0].shape
    shape = (batch, candidates + length)
    joined = [torch.empty(shape, dtype=column.dtype, device=column.device) for column in columns]
    joined_known, (least, most) = torch.empty_like(known), ngrams
    before, after = _C.CandidateColumns(*columns), _C.CandidateColumns(*joined)
    _C.add_copies(history, history_length, active, known, chances, before, after, joined_known, least, most)
    tokens, parents, depths, scores = joined
    return (tokens, parents, depths, scores), joined_known


def add_copies_reference(columns, known, history, history_length, active, chances, length, ngrams):
    """add_copies, request by request: lists of (token, parent, depth, score) for each, and which have any."""
    rows, has = [], []
    for b, text_length in enumerate(history_length.tolist()):
        text = history[b, :text_length].tolist()
        nodes = [list(node) for node in zip(*(column[b].tolist() for column in columns), strict=True)]
        if not known[b]:
            nodes = [nodes[0], *([token, parent, -1, score] for token, parent, _, score in nodes[1:])]
        match, end = 0, 0
        for place in range(1, text_length) if active[b] else ():
            same = 0
            while same < min(ngrams[1], place) and text[place - 1 - same] == text[-1 - same]:
                same += 1
            if same >= ngrams[0]:
                match, end = max((match, end), (same, place))
        has.append(bool(known[b]) or match > 0)
        last, score, agrees = 0, 0.0, bool(known[b])
        copied = [[-1, -1, -1, 0.0] for _ in range(length)]
        for i in range(length if match else 0):
            token = text[end + i % (text_length - end)]
            score += float(chances[min((match + i).bit_length(), CLASSES) - 1])
            found = [c for c, (t, p, d, _) in enumerate(nodes) if c and agrees and d >= 0 and (t, p) == (token, last)]
            if found:
                last = found[0]
                nodes[last][3] = max(nodes[last][3], score)
                continue
            copied[i] = [token, last, i + 1, score]
            last, agrees = len(nodes) + i, False
        rows.append(nodes + copied)
    return rows, has
