"""What a drafter sees of the engine: a request, and a batch on the device. Drafters import nothing of engine/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.cache.prefix_cache import Sharing
from specengine.draft_trees.tree import DraftLogits, TreeBatch
from specengine.models.lora.adapters import Adapter
from specengine.ops.commit_tokens import Limits
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.select_nodes import Columns
from specengine.ops.verify_tree import Accepted
from specengine.rules.base import Wants
from specengine.types import CycleTrace, SamplingParams, SourceStats


class DraftRequest(Protocol):
    """What a drafter sees of a request.

    tokens: prompt and output; the last token is the root, whose keys and values are not cached yet.
    limit: output tokens allowed.  accepted_last: drafted tokens that the last cycle accepted.
    adapter: of the target for this request; texts and pages of one adapter are not drafted from for another.
    pages: of the target's cache.  sharing: the requests it shares pages with, if any.
    drafter_reads: whether the drafter reads it; otherwise it keeps nothing of it beside the target's cache.
    drafter_states: what each drafter, and each part of one, remembers of the request, by the object that keeps it.
    sources: drafted and accepted nodes by source.  trace: of its cycles, where the request asks for one.
    """

    tokens: list[int]
    prompt_length: int
    limit: int
    params: SamplingParams
    seed: int
    adapter: Adapter | None
    pages: list[int]
    sharing: Sharing | None
    drafter_reads: bool
    drafter_states: dict[Any, Any]
    accepted_last: int
    sources: dict[str, SourceStats]
    trace: list[CycleTrace]

    @property
    def draft_limit(self) -> int:
        """Deepest level worth drafting; deeper nodes could not be committed."""
        ...

    def shareable_tokens(self, filled: int) -> list[int]:
        """Returns the tokens that later requests may find, if a cache holds the first `filled` of them."""
        ...


ExtraCandidates = Callable[["DraftBatch", Columns, torch.Tensor, int], tuple[Columns, torch.Tensor]]


class DraftBatch(Protocol):
    """What a drafter sees of a batch on the device: the first `size` slots, with trees of `nodes` nodes each.

    row_start: int32 [size + 1].  accepted: of the last pass.  drafter_state: of the drafter's new_device_state.
    params: of the requests.  wants: of the rule.  draft_logits: set by a draft whose distributions the rule reads.
    kept: int32 [size, nodes], the candidates that selected() kept, -1: no node.
    extra_candidates(batch, columns, known, levels): joins others to candidates before the best are selected, if given.
    """

    size: int
    nodes: int
    cache: CacheBatch
    history: TokenHistory
    limits: Limits
    row_start: torch.Tensor
    accepted: Accepted
    drafter_state: Any
    params: SamplingTable
    wants: Wants
    draft_logits: DraftLogits | None

    @property
    def kept(self) -> torch.Tensor: ...

    def draft_limits(self, levels: int) -> torch.Tensor:
        """Returns the deepest level of each request that can be committed, int32 [size]; at most `levels`."""
        ...

    extra_candidates: ExtraCandidates | None

    def lookup(self, ngrams: tuple[int, int]) -> TreeBatch:
        """Returns trees drafted by prompt lookup; see ops.draft_lookup."""
        ...

    def selected(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        scores: torch.Tensor,
        known: torch.Tensor,
        levels: int,
    ) -> TreeBatch:
        """Returns the best candidates of every running request, `nodes` of each; see ops.select_nodes.

        known: int32 [size], 0: only the root is wanted.  levels: the deepest level wanted. Nodes that could not be
        committed are left out.
        """
        ...

    def mark(self, phase: str) -> None:
        """Ends a phase of the cycle's clock."""
        ...
