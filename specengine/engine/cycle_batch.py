"""What a cycle asks of a batch, on the host (`batch.Batch`) and on the device (`device.graph_batch.GraphBatch`)."""

from __future__ import annotations

from typing import Protocol

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.drafters.drafter import Drafter
from specengine.models.hidden_states import HiddenStates
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.verify_tree import Accepted, VerifyWorkspace
from specengine.rules import Rule


class CycleBatch(Protocol):
    """Requests of one cycle, with their parameters and histories as the ops take them.

    reads_logits: whether the likeliest allowed token of each node is not enough.
    reads_forbidden: whether logits of forbidden tokens are read too, so that the head need not wait for the masks.
    draft_logits: the distributions of the drafted tokens, where the rule reads them.
    masks: int32 [M, W], the tokens that may follow each node; None where no request is constrained.
    """

    cache: CacheBatch
    params: SamplingTable
    history: TokenHistory
    workspace: VerifyWorkspace
    reads_logits: bool
    reads_forbidden: bool
    draft_logits: DraftLogits | None
    masks: torch.Tensor | None

    def draft(self, drafter: Drafter, rule: Rule) -> TreeBatch:
        """Drafts one tree per request."""
        ...

    def fill_masks(self, tree: TreeBatch) -> None:
        """Completes the masks of the tree's nodes."""
        ...

    def commit(self, tree: TreeBatch, accepted: Accepted, scores: torch.Tensor) -> None:
        """Appends the accepted tokens and the bonus token to every request, and makes its cached prefix as much longer.

        Cuts the path of a request that ends inside of it.
        """
        ...

    def observe(self, drafter: Drafter, hidden_states: HiddenStates) -> None:
        """Shows the drafter the committed tokens and their hidden states."""
        ...

    def mark(self, phase: str) -> None:
        """Ends a phase of the cycle for the clock."""
        ...
