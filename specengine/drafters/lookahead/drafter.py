"""Lookahead decoding (Fu et al. 2024): the target itself finds n-grams beside its own text, by Jacobi's iteration.

The target's pass carries the window's guesses and, as drafts, the n-grams found behind the root's token so far. Both
are one tree, in which shared nodes appear once. A guess of the window that turns out true is accepted like any other
node; the published code does not accept it. Under every rule the window is refreshed with the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specengine._C import PhrasePool
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.merge import MergedPaths
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.lookahead.config import Config
from specengine.drafters.lookahead.window import JacobiWindow
from specengine.drafters.phrases.store import PhraseStore
from specengine.drafters.policies import policy_of
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer


@dataclass
class State:
    """What the drafter remembers of one request.

    column: of the last tree; empty where the window was left out.  pooled: tokens whose n-grams are in the pool.
    """

    window: JacobiWindow
    pool: PhrasePool
    column: list[int] = field(default_factory=list)
    pooled: int = 0

    def pool_text(self, tokens: Sequence[int], ngram: int) -> None:
        """Puts the n-grams that end in new tokens of prompt and answer into the pool."""
        for end in range(max(self.pooled + 1, ngram), len(tokens) + 1):
            self.pool.insert(tokens[end - ngram], tokens[end - ngram + 1 : end])
        self.pooled = len(tokens)


class Lookahead(Drafter):
    """Drafts n-grams that the target found behind its own guesses.

    costs: of cycles; by default learned from them.
    """

    name = "lookahead"
    config_type = Config
    reads_choices = True
    config: Config

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        length = config.ngram - 1
        self._phrases = PhraseStore(
            length, config.guesses, target, warm=config.warm, keys=config.keys, file=config.pool
        )
        self.policy = policy_of(self, target, costs, [])

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    @property
    def pool(self) -> PhrasePool:
        """The n-grams of all requests."""
        return self._phrases.pool

    def save_pool(self, path: str | Path) -> None:
        """Writes the pool to a file for `pool=FILE`; see PhraseStore.save."""
        self._phrases.save(path)

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft_whole(requests, lambda drafts: self._trees(requests, drafts))

    def observe_choices(self, draft: Draft, committed: Sequence[list[int]], choices: Sequence[Sequence[int]]) -> None:
        for request, tokens, own in zip(draft.requests, committed, choices, strict=True):
            state: State | None = request.drafter_states.get(self)
            # A captured cycle may have cut the tree, so that nodes of the column have no choice.
            if state is not None and state.column and max(state.column) < len(own):
                root = request.tokens[-len(tokens) - 1]
                for token, phrase in state.window.advance(root, [own[node] for node in state.column]):
                    state.pool.insert(token, phrase)

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        for request in draft.requests if self.config.prompt else ():
            if state := request.drafter_states.get(self):
                state.pool_text(request.tokens, self.config.ngram)
        self.policy.observe(draft, committed)

    def _trees(self, requests: Sequence[DraftRequest], drafts: bool) -> list[DraftTree]:
        for request in requests:
            if state := request.drafter_states.get(self):
                state.column = []
        if not drafts:
            return [DraftTree(request.tokens[-1:], [-1]) for request in requests]
        return [self._tree(request) for request in requests]

    def _tree(self, request: DraftRequest) -> DraftTree:
        tokens, limit = request.tokens, request.draft_limit
        if self not in request.drafter_states:
            request.drafter_states[self] = self._begin(request)
        state: State = request.drafter_states[self]
        paths = MergedPaths(tokens[-1])
        phrases = state.pool.newest(tokens[-1], self.config.guesses)
        paths.add_phrases(0, [phrase[:limit] for phrase in phrases])
        if state.window.depth <= limit:
            state.column = state.window.add_to(paths, 0)
        return paths.tree

    def _begin(self, request: DraftRequest) -> State:
        window = JacobiWindow(self.config.window, self.config.ngram, request.tokens)
        state = State(window, self._phrases.pool_for(request))
        if self.config.prompt:
            state.pool_text(request.tokens, self.config.ngram)
        return state
