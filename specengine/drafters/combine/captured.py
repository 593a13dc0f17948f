"""How captured cycles draft with copies of earlier text and a network: both give candidates of one tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specengine._C import LONGEST_MATCH, MAX_CANDIDATES
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.capabilities import DeviceStateDrafter
from specengine.drafters.engine_views import DraftBatch
from specengine.drafters.prompt_lookup.drafter import PromptLookup
from specengine.ops.growth.add_copies import LONGEST, add_copies


class CopiesBatch:
    """Shows a batch to a network, and adds a chain of copies to what it drafted.

    The chain has at most as many levels as the network, so a cycle commits no more than the network's state has room
    for. It is shorter where the network leaves no room for its candidates.
    chances, ngrams: see add_copies.
    """

    def __init__(self, batch: Any, chances: torch.Tensor, ngrams: tuple[int, int]) -> None:
        self._batch, self._chances, self._ngrams = batch, chances, ngrams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def selected(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        scores: torch.Tensor,
        known: torch.Tensor,
        levels: int,
    ) -> TreeBatch:
        """Returns the best nodes of both; see DraftBatch.selected."""
        history, active = self._batch.history, self._batch.limits.active
        columns = tokens, parents, depths, scores
        text = history.tokens, history.length, active
        if length := min(levels, LONGEST, MAX_CANDIDATES - tokens.shape[1]):
            columns, known = add_copies(columns, known, *text, self._chances, length, self._ngrams)
        return self._batch.selected(*columns, known, levels)


class CapturedPair:
    """prompt_lookup and a network, which keeps the device state of both.

    network: a Drafter that is a DeviceStateDrafter. The chances of copies are those that are known at the start.
    """

    def __init__(self, copies: PromptLookup, network: Any, device: torch.device) -> None:
        self.network = network
        self._chances = torch.tensor(copies.acceptance.rates()[::2], device=device).log()  # of first branches
        self._ngrams = (copies.config.min_ngram, LONGEST_MATCH)

    @staticmethod
    def of(parts: Sequence[Any], device: torch.device) -> CapturedPair | None:
        """Returns the pair that some parts are; None where captured cycles cannot draft with them."""
        copies = [part for part in parts if isinstance(part, PromptLookup)]
        networks = [part for part in parts if isinstance(part, DeviceStateDrafter) and part.drafts_in_cycle]
        if len(parts) != 2 or not (len(copies) == len(networks) == 1):
            return None
        return CapturedPair(copies[0], networks[0], device)

    def draft(self, batch: DraftBatch) -> TreeBatch:
        """Returns the likeliest nodes of both."""
        shown: Any = CopiesBatch(batch, self._chances, self._ngrams)
        return self.network.draft_on_device(shown)
