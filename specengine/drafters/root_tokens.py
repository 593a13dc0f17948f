"""The roots of a batch on the device, as tokens and as trees."""

from __future__ import annotations

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.engine_views import DraftBatch
from specengine.ops.sampling_table import TokenHistory


def root_tokens(history: TokenHistory) -> torch.Tensor:
    """Returns the last committed token of every request, int32 [B, 1]."""
    return history.tokens.gather(1, history.length[:, None].long() - 1)


def root_trees(batch: DraftBatch) -> TreeBatch:
    """Returns the root of every running request alone; batch.nodes is 1."""
    return batch.lookup(ngrams=(1, 1))  # a tree of one node has no room for what the lookup finds
