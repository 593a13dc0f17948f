"""Prompt lookup: drafts what followed the last few tokens when they occurred before (Saxena 2023).

Several earlier occurrences are merged into one tree, likeliest node first. A node's chance depends on the length of its
match, which includes the drafted tokens that lead to it. Where a tree was proposed, the cycle's text is compared with
all its nodes, so the rates are learned even where none was verified. A skipped cycle teaches nothing. The rates also
decide the size of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specengine._C import LONGEST_MATCH, MAX_NODES, NgramIndex
from specengine.draft_policy.acceptance import Acceptance
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.policy import Source
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftBatch, DraftRequest
from specengine.drafters.policies import policy_of
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.utils.spec_string import check_range

# A node's kind: bits of the match's length (1, 2-3, 4-7, 8-15, 16 or more tokens), then first branch or a later one.
PRIOR = (0.2, 0.06, 0.5, 0.1, 0.7, 0.1, 0.8, 0.1, 0.9, 0.1)  # rounded from chats and code of a small model
UNLIKELY = 0.01  # below this no row is worth its cost


@dataclass(frozen=True)
class Config:
    """The options; lengths are in tokens.

    nodes: largest tree, root included.  length: longest continuation drafted.
    matches: most occurrences looked at per n-gram length. On CUDA the tree is a chain: the best match's continuation.
    adaptive: draft as many nodes as pay, otherwise the largest tree. Any choice is lossless under the rule `match`.
    """

    max_ngram: int = 4
    min_ngram: int = 1
    nodes: int = 16
    length: int = 15
    matches: int = 4
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_range("min_ngram", self.min_ngram, 1, 32)
        check_range("max_ngram", self.max_ngram, 1, 32)
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram: {self.min_ngram} is more than max_ngram={self.max_ngram}")
        check_range("nodes", self.nodes, 2, MAX_NODES)
        check_range("length", self.length, 1, MAX_NODES - 1)
        check_range("matches", self.matches, 1, 1024)


@dataclass
class State:
    """What the drafter remembers of a request. index: of its tokens as they were at the last draft."""

    index: NgramIndex
    acceptance: Acceptance


class PromptLookup(Drafter, Source):
    """Drafts copies of earlier text. It costs little, and it pays where the text repeats itself.

    Example: after 1 2 3 9 1 2 4 1 2 with 2-grams, the tree is 2 -> 4 -> 1 -> 2 and 2 -> 3 -> 9 -> 1.
    costs: of cycles; by default learned from them.
    """

    name = "prompt_lookup"
    config_type = Config
    drafts_in_cycle = True
    config: Config

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        self._on_device = target.ops.on_device  # its trees are chains, and its graphs choose the width
        self.acceptance = Acceptance(PRIOR, weight=20, memory=200)  # of all requests
        self.policy = policy_of(self, target, costs, [self])

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        config = self.config
        return self._on_device or (config.matches == 1 and config.min_ngram == config.max_ngram)

    @property
    def max_nodes(self) -> int:
        return min(self.config.nodes, self.config.length + 1) if self._on_device else self.config.nodes

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft(requests)

    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        least = UNLIKELY if min_gain else 0.0
        return [self._grown(request, least) for request in requests]

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            if state := request.drafter_states.get(self):
                state.index.skip()

    @property
    def learned(self) -> list[list[float]]:
        return self.acceptance.learned

    def draft_on_device(self, batch: DraftBatch) -> TreeBatch:
        """Returns chains: the continuation of the longest match."""
        return batch.lookup(ngrams=(self.config.min_ngram, LONGEST_MATCH))

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        self.policy.observe(draft, committed)
        for request, tokens in zip(draft.requests, committed, strict=True):
            state: State | None = request.drafter_states.get(self)
            if state is None:  # nothing was ever drafted for it
                continue
            for kind, accepted in state.index.judge(tokens):
                state.acceptance.observe(kind, accepted)

    def _grown(self, request: DraftRequest, least: float) -> ScoredTree:
        """Returns the largest tree of a request, best node first."""
        config, tokens = self.config, request.tokens
        if self not in request.drafter_states:
            acceptance = Acceptance(self.acceptance, weight=8, memory=50)
            request.drafter_states[self] = State(NgramIndex(config.min_ngram, config.max_ngram), acceptance)
        state: State = request.drafter_states[self]
        state.index.append(tokens[len(state.index) :])
        rates = state.acceptance.rates()
        deepest = min(config.length, request.draft_limit)
        drafted, parents, kinds = state.index.draft(config.matches, config.nodes, deepest, rates, least)
        return ScoredTree(drafted, parents, [1.0, *(rates[kind] for kind in kinds[1:])])
