"""Plain decoding: the tree is the root alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.drafters.base import Drafter


@dataclass(frozen=True)
class Config:
    """No options."""


class NoneDrafter(Drafter):
    """Drafts nothing; every other drafter is measured against it."""

    name = "none"
    config_type = Config
    drafts_on_device = True

    @property
    def drafts_chains(self) -> bool:
        return True

    @property
    def max_nodes(self) -> int:
        return 1

    def draft(self, requests: Sequence) -> list[DraftTree]:
        return [DraftTree([request.tokens[-1]], [-1]) for request in requests]

    def draft_on_device(self, slots) -> TreeBatch:
        return slots.lookup(ngrams=(1, 1))  # a tree of one node has no room for what it finds
