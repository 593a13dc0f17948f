"""How captured cycles draft with copies of earlier text and a network: both give candidates of one tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine._C import LONGEST_MATCH, MAX_CANDIDATES
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftBatch
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.prompt_lookup.drafter import PromptLookup
from specengine.ops.growth.add_copies import LONGEST, add_copies
from specengine.ops.select_nodes import Columns


class CapturedPair:
    """prompt_lookup and a network, which keeps the device state of both.

    The chances of copies are those that are known at the start.
    """

    def __init__(self, copies: PromptLookup, network: NetworkDrafter, device: torch.device) -> None:
        self.network = network
        self._chances = torch.tensor(copies.acceptance.rates()[::2], device=device).log()  # of first branches
        self._ngrams = (copies.config.min_ngram, LONGEST_MATCH)

    @staticmethod
    def of(parts: Sequence[Drafter], device: torch.device) -> CapturedPair | None:
        """Returns the pair that some parts are; None where captured cycles cannot draft with them."""
        copies = [part for part in parts if isinstance(part, PromptLookup)]
        networks = [part for part in parts if isinstance(part, NetworkDrafter) and part.drafts_in_cycle]
        if len(parts) != 2 or not (len(copies) == len(networks) == 1):
            return None
        return CapturedPair(copies[0], networks[0], device)

    def draft(self, batch: DraftBatch) -> TreeBatch:
        """Returns the likeliest nodes of both."""
        batch.extra_candidates = self._join
        return self.network.draft_on_device(batch)

    def _join(
        self, batch: DraftBatch, columns: Columns, known: torch.Tensor, levels: int
    ) -> tuple[Columns, torch.Tensor]:
        """Adds a chain of copies to the network's candidates.

        The chain has at most as many levels as the network, so a cycle commits no more than the network's state has
        room for. It is shorter where the network leaves no room for its candidates.
        """
        length = min(levels, LONGEST, MAX_CANDIDATES - columns[0].shape[1])
        if not length:
            return columns, known
        text = batch.history.tokens, batch.history.length, batch.limits.active
        return add_copies(columns, known, *text, self._chances, length, self._ngrams)
