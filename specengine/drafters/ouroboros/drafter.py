"""Ouroboros (Zhao et al. 2024): a small model drafts by phrases, and refused tokens of its drafts still teach it.

A sentence of `length` tokens comes from the small model, which decodes with lookahead over a pool of phrases. The
newest phrases behind its last token are appended as suffixes, and one target pass verifies all of it. The target's
likeliest tokens behind refused tokens become new phrases (inspiration); those along the suffixes replace the suffixes
(refinement). The pool lives as long as the drafter and serves all requests (warm start).

Phrases are deterministic proposals, so they serve every temperature. Above 0 a sentence is drawn as the rule `match`
would draw it from the small model. Beyond the published code: these draws, batches, suffixes that share a path, and one
bonus token behind a suffix that was right to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from specengine._C import MAX_NODES, PhrasePool
from specengine.cache.kv_cache import KVCache
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.merge import MergedPaths
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.draft_model.small_model import SmallModel
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.lookahead.window import JacobiWindow
from specengine.drafters.ouroboros.config import Config
from specengine.drafters.ouroboros.sentences import RequestState, SentenceDrafter
from specengine.drafters.phrases.store import PhraseStore
from specengine.drafters.policies import policy_of
from specengine.models.hidden_states import HiddenStates
from specengine.models.transformer import Transformer
from specengine.rules.base import Wants
from specengine.tokenizer import Tokenizer


class Ouroboros(Drafter):
    """Drafts sentences of a small model and phrases behind them.

    costs: of cycles; by default learned from them.
    """

    name = "ouroboros"
    config_type = Config
    config: Config
    takes_path = True
    reads_choices = True

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        self.small = SmallModel(self.name, config.layers, config.dtype, path, target)
        self._length, self._window, self._ngram = config.sizes
        length = self._ngram - 1
        self._phrases = PhraseStore(length, self._window, target, warm=config.warm, keys=config.keys, file=config.pool)
        self.policy = policy_of(self, target, costs, [])
        rows = JacobiWindow.most_nodes(self._window, self._ngram)
        self._sentences = SentenceDrafter(self.small.model, rows, self._window, config.noise)

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    @property
    def spare_slots(self) -> int:
        return MAX_NODES + self._length  # the small model's passes lie behind the sentence so far

    @property
    def page_bytes(self) -> int:
        return self.small.model.page_bytes

    @property
    def pool(self) -> PhrasePool:
        """The phrases of all requests."""
        return self._phrases.pool

    def save_pool(self, path: str | Path) -> None:
        """Writes the pool to a file for `pool=FILE`; see PhraseStore.save."""
        self._phrases.save(path)

    def attach(self, cache: KVCache) -> None:
        self.small.attach(cache)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        self.small.check_tokenizer(tokenizer)

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.draft_for(Wants.NOTHING, requests)

    def draft_for(self, wants: Wants, requests: Sequence[DraftRequest]) -> Draft:
        # Other rules draw their residual with the noise of `match`. Drafts with the same noise would bias the output.
        return self.policy.draft_whole(requests, partial(self._trees, requests, wants is Wants.NOTHING))

    def observe_choices(self, draft: Draft, committed: Sequence[list[int]], choices: Sequence[Sequence[int]]) -> None:
        for request, tokens, own in zip(draft.requests, committed, choices, strict=True):
            if state := request.drafter_states.get(self.small):
                self._learn(state, tokens, own)

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        self.policy.observe(draft, committed)

    def release(self, request: DraftRequest) -> None:
        self.small.release(request)

    def _trees(self, requests: Sequence[DraftRequest], noise: bool, drafts: bool) -> list[DraftTree]:
        """Drafts all trees. noise: draw sentences as `match` would; otherwise they are the likeliest tokens."""
        for request in requests:
            if state := request.drafter_states.get(self.small):
                state.sentence, state.suffixes = [], []
        if not drafts:
            return [DraftTree(request.tokens[-1:], [-1]) for request in requests]
        states = [self._state(request) for request in requests]
        self._draft_sentences(requests, states, noise)
        return [self._tree(request, state) for request, state in zip(requests, states, strict=True)]

    def _state(self, request: DraftRequest) -> RequestState:
        if self.small not in request.drafter_states:
            window = JacobiWindow(self._window, self._ngram, request.tokens)
            pages, cached = self.small.begin(request, self.spare_slots)
            pool = self._phrases.pool_for(request)
            request.drafter_states[self.small] = RequestState(pages, cached, window=window, pool=pool)
        return request.drafter_states[self.small]

    def _draft_sentences(self, requests: Sequence[DraftRequest], states: list[RequestState], noise: bool) -> None:
        """Drafts a sentence for every request, of as many tokens as are worth drafting."""
        goals = [min(self._length, self.small.depth(request)) for request in requests]
        able = [each for each in zip(requests, states, goals, strict=True) if each[2] > 0]
        if able:
            able_requests, able_states, able_goals = zip(*able, strict=True)
            # What is left to pass: a suffix, the token behind it, and the root.
            self.small.catch_up(able_requests, able_states, self._ngram + 1)
            self._sentences.draft(self.small.cache, able_requests, able_states, able_goals, noise)

    def _tree(self, request: DraftRequest, state: RequestState) -> DraftTree:
        """Returns the sentence and the suffixes behind it as a tree."""
        tree = MergedPaths(request.tokens[-1])
        sentence = state.sentence
        last = tree.add_path(0, sentence)[-1] if sentence else 0
        left = request.draft_limit - len(sentence)
        for phrase in state.pool.newest(sentence[-1], self.config.suffixes) if sentence else ():
            state.suffixes.append((phrase, tree.add_path(last, phrase[:left])))
        return tree.tree

    def _learn(self, state: RequestState, committed: list[int], choices: Sequence[int]) -> None:
        sentence = state.sentence
        if not sentence or len(choices) <= len(sentence):  # a captured cycle may have cut the tree
            return
        pairs = enumerate(zip(sentence, committed, strict=False))
        right = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(sentence), len(committed)))
        if self.config.inspire and right < len(sentence):
            self._inspire(state, right, choices)
        if self.config.refine == "always" or (self.config.refine == "confirmed" and right == len(sentence)):
            self._refine(state, choices)

    def _inspire(self, state: RequestState, right: int, choices: Sequence[int]) -> None:
        """Makes phrases of the refused part of a sentence.

        A phrase begins with the target's likeliest token behind a token of the sentence. It goes on as long as the
        sentence has the same tokens.  right: accepted tokens of the sentence.
        """
        sentence = state.sentence
        length = self._ngram - 1
        following = choices[1 : len(sentence) + 1]  # by the target, behind each token of the sentence
        for start in range(right, len(sentence) - length + 1):
            phrase = [*following[start : start + length]]
            if sentence[start + 1 : start + length] == phrase[:-1]:
                state.pool.insert(sentence[start], phrase)

    def _refine(self, state: RequestState, choices: Sequence[int]) -> None:
        """Replaces suffixes by the target's likeliest tokens along them."""
        for phrase, nodes in state.suffixes:
            if len(nodes) == len(phrase) and max(nodes) < len(choices):
                along = [choices[node] for node in (len(state.sentence), *nodes[:-1])]
                state.pool.replace(state.sentence[-1], phrase, along)
