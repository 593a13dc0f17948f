"""Plain decoding: the tree is the root alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.root_tokens import root_trees


@dataclass(frozen=True)
class Config:
    """There are no options."""


class NoneDrafter(Drafter):
    """Drafts nothing; the baseline of every other drafter."""

    name = "none"
    config_type = Config
    drafts_in_cycle = True

    @property
    def drafts_chains(self) -> bool:
        return True

    @property
    def max_nodes(self) -> int:
        return 1

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return Draft(requests, [DraftTree([request.tokens[-1]], [-1]) for request in requests])

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        return root_trees(batch)
