"""Medusa's draft on the CPU: one native call from the target's last hidden states to the children of every level."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine import _C
from specengine.drafters.level_drafts import Children, DraftedLevels
from specengine.drafters.medusa.heads import Head
from specengine.ops.decoder import native_projection


class HeadsDraft:
    """Drafts with some heads.

    vocabulary: int32 [Vd], the target's token of each of the drafter's; None: the same.  ranks: children per level.
    """

    def __init__(self, hidden: int, heads: Sequence[Head], vocabulary: torch.Tensor | None, ranks: int) -> None:
        native = [
            _C.DraftHead(tuple(map(native_projection, head.blocks)), native_projection(head.logits)) for head in heads
        ]
        self._network = _C.HeadsNetwork(hidden, tuple(native), vocabulary)
        self._levels = DraftedLevels(ranks)

    def __call__(self, rows: torch.Tensor, levels: int) -> Children:
        """Returns the likeliest tokens of every request's first `levels` levels, and their log-probabilities.

        The tokens are the target's ids.  rows: float32 [B, hidden], the target's last hidden states before the roots.
        Raises ValueError for more levels than heads, and for logits that are no distribution.
        """
        children, scores = self._levels.room(len(rows), levels)
        _C.draft_heads(self._network, rows, children, scores)
        return children.tolist(), scores.tolist()
