"""Lookahead decoding (Fu et al. 2024): the target itself finds n-grams beside its own text, by Jacobi's iteration.

Its pass carries the window's guesses and, as drafts, the n-grams found behind the root's token so far. Both are one
tree: what they share is passed once, and a guess of the window that turns out true is accepted like any other node,
which the published code leaves. Under every rule the window is refreshed with the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specengine._C import MAX_NODES, PhrasePool
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_trees.merge import MergedPaths
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.lookahead.window import JacobiWindow
from specengine.drafters.phrases.drafter import MOST_KEYS, PhraseDrafter, check_pool
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Config:
    """window: columns, W.  ngram: length, N.  guesses: n-grams tried per cycle, G, and kept per token.
    prompt: the pool knows the prompt's n-grams, too.  warm: one pool for all requests, else one for each.
    keys: tokens that a pool has n-grams of, at most.  pool: a file to begin with; see drafting.phrase_file.
    adaptive: leave out what does not pay, else draft in every cycle.
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    prompt: bool = True
    warm: bool = False
    keys: int = 16384
    pool: str = ""
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_range("window", self.window, 1, MAX_NODES)
        check_range("ngram", self.ngram, 2, 32)
        check_range("guesses", self.guesses, 1, MAX_NODES)
        check_range("keys", self.keys, 1, MOST_KEYS)
        if self.nodes > MAX_NODES:
            raise ValueError(
                f"window: {self.window} columns and {self.guesses} guesses of {self.ngram}-grams are up to "
                f"{self.nodes} nodes, at most {MAX_NODES} are possible"
            )
        check_pool(self.pool, self.warm)

    @property
    def nodes(self) -> int:
        """Of the largest tree, root included."""
        return 1 + JacobiWindow.most_nodes(self.window, self.ngram) + self.guesses * (self.ngram - 1)


@dataclass
class State:
    """What the drafter remembers of one request. column: of the last tree; empty where the window was left out."""

    window: JacobiWindow
    pool: PhrasePool
    column: list[int]


class Lookahead(PhraseDrafter):
    """Drafts n-grams that the target said behind its own guesses.

    costs: what rows cost; by default the target's, measured.
    """

    name = "lookahead"
    config_type = Config
    config: Config

    def __init__(self, config: Config, path: str | None, target, costs: CostModel | None = None) -> None:
        super().__init__(config, path, target)
        self._open_pool(config.ngram - 1, config.guesses, target)
        self._try(target, costs)

    def _trees(self, requests: Sequence, paused: bool) -> list[DraftTree]:
        return [self._tree(request, paused) for request in requests]

    def _tree(self, request, paused: bool) -> DraftTree:
        tokens, limit = request.tokens, request.draft_limit
        state = request.drafter_state
        if state is None:
            state = request.drafter_state = self._begun(request)
        paths, state.column = MergedPaths(tokens[-1]), []
        if not paused:
            phrases = state.pool.newest(tokens[-1], self.config.guesses)
            paths.add_phrases(0, [phrase[:limit] for phrase in phrases])
            if state.window.depth <= limit:
                state.column = state.window.add_to(paths, 0)
        return paths.tree

    def release(self, request) -> None:
        request.drafter_state = None  # a pool: its request waits for the others of its call

    def _learn(self, request, committed: list[int], said: Sequence[int]) -> None:
        state = request.drafter_state
        if state.column and max(state.column) < len(said):  # a device's graph may have cut the tree
            root = request.tokens[-len(committed) - 1]
            for token, phrase in state.window.advance(root, [said[node] for node in state.column]):
                state.pool.insert(token, phrase)

    def _begun(self, request) -> State:
        config, tokens = self.config, request.tokens
        pool = self._pool_of_request()
        for start in range(len(tokens) - config.ngram + 1 if config.prompt else 0):
            pool.insert(tokens[start], tokens[start + 1 : start + config.ngram])
        return State(JacobiWindow(config.window, config.ngram, tokens), pool, [])
