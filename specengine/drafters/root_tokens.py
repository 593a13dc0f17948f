"""The roots of a batch on the device, as trees."""

from __future__ import annotations

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.engine_views import DraftBatch


def root_trees(batch: DraftBatch) -> TreeBatch:
    """Returns the root of every running request alone; batch.nodes is 1."""
    return batch.lookup(ngrams=(1, 1))  # a tree of one node has no room for what the lookup finds
