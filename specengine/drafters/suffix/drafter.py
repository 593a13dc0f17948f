"""Suffix: drafts what followed the longest repeated context most often, in this text, a corpus and earlier requests.

(SuffixDecoding, Oliaro et al. 2024; with a corpus REST, He et al. 2023.) Each source drafts a tree of its own, and the
trees are joined. A node's chance depends on the length of its match and on how often its token followed. Where a tree
was proposed, the cycle's text is compared with all its nodes, so the rates are learned even where none was verified. A
skipped cycle teaches nothing. The rates also decide the size of the tree.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specengine._C import MATCHED, SuffixAutomaton, TextCorpus, TextDrafts
from specengine.draft_policy.acceptance import Acceptance
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.policy import Source
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.drafter import Drafter
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.policies import policy_of
from specengine.drafters.shipped import shipped_folder
from specengine.drafters.source_stats import record_counts
from specengine.drafters.suffix.config import Config
from specengine.drafters.suffix.corpus_file import check_corpus_tokenizer, open_corpus
from specengine.drafters.suffix.text_memory import TextMemory
from specengine.models.hidden_states import HiddenStates
from specengine.models.lora.adapters import Adapter
from specengine.models.transformer import Transformer
from specengine.tokenizer import Tokenizer

FILE = "corpus.safetensors"  # of a folder
UNLIKELY = 0.01  # below this no row is worth its cost
# By the length of the match (rows), and by what followed it (columns): only this token, once; only this token, more
# often; this token most of the time; this token less often; another token as often; another token less often.
# Rounded from chats and code of a small model.
PRIOR = (
    *(0.2, 0.4, 0.3, 0.2, 0.1, 0.05),
    *(0.4, 0.7, 0.4, 0.2, 0.1, 0.1),
    *(0.6, 0.8, 0.5, 0.3, 0.15, 0.1),
    *(0.8, 0.9, 0.5, 0.3, 0.15, 0.1),
    *(0.9, 0.95, 0.7, 0.4, 0.1, 0.05),
)
OWN, CORPUS, EARLIER = SOURCES = range(3)
NAMES = ("text", "corpus", "earlier")


@dataclass
class State:
    """What the drafter remembers of one request.

    text: all tokens but those since the last draft.  rates: by source, how often each kind of node was right.
    sources, drafts: of the last draft.
    """

    rates: list[Acceptance]
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    sources: list[int] = field(default_factory=list)
    drafts: TextDrafts | None = None


class Suffix(Drafter, Source):
    """Drafts copies of earlier texts, by how often they occurred.

    path: of a corpus, see `specengine corpus`, or of a folder with one.
    costs: of cycles; by default learned from them.
    """

    name = "suffix"
    config_type = Config
    config: Config
    takes_path = True

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CycleCosts | None = None) -> None:
        super().__init__(config, path, target)
        if path and not config.corpus:
            raise ValueError(f"corpus: false, but {path} is given as one")
        self._path = _corpus_path(path, target) if config.corpus else None
        self.corpus = open_corpus(self._path, target.config.vocab_size) if self._path else None
        self._earlier: dict[Adapter | None, TextMemory] = {}  # another adapter's answers are another model's
        # of all requests
        self.rates = [Acceptance(PRIOR, weight=20, memory=1000) for _ in SOURCES]
        self.policy = policy_of(self, target, costs, [self])

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    def earlier(self, adapter: Adapter | None) -> TextMemory | None:
        """Returns the memory of earlier answers with this adapter; None: nothing is remembered."""
        if self.config.remember and adapter not in self._earlier:
            self._earlier.setdefault(adapter, TextMemory(self.config.remember))  # release() is called in any thread
        return self._earlier.get(adapter)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is not None and self._path is not None:
            check_corpus_tokenizer(self._path, tokenizer)

    def propose(self, requests: Sequence[DraftRequest], min_gain: float) -> list[ScoredTree]:
        least = UNLIKELY if min_gain else 0.0
        return [self._grown(request, least) for request in requests]

    def draft(self, requests: Sequence[DraftRequest]) -> Draft:
        return self.policy.draft(requests)

    def skip(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            if state := request.drafter_states.get(self):
                state.drafts = None

    def observe(self, draft: Draft, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        # As a part of a combination, which counts its nodes itself, it has made no step.
        drafted: Sequence[DraftTree | None] = draft.steps[0].trees if draft.steps else [None] * len(committed)
        for request, tree, tokens in zip(draft.requests, drafted, committed, strict=True):
            state: State | None = request.drafter_states.get(self)
            if state is None or state.drafts is None:  # nothing was drafted for it
                continue
            if tree is not None and len(tree.tokens) > 1:
                names = [NAMES[source] for source in state.sources]
                accepted = tokens[: request.accepted_last]
                record_counts(request, state.drafts.count(tree.tokens, tree.parents, names, accepted))
            for text, kind, right in state.drafts.judge(tokens):
                state.rates[state.sources[text]].observe(kind, right)
            state.drafts = None
        self.policy.observe(draft, committed)

    @property
    def learned(self) -> list[list[float]]:
        return [numbers for rates in self.rates for numbers in rates.learned]

    def release(self, request: DraftRequest) -> None:
        earlier = self.earlier(request.adapter)
        if earlier is not None and len(request.tokens) > request.prompt_length:
            earlier.add(request.tokens[max(0, request.prompt_length - MATCHED) :])

    def _grown(self, request: DraftRequest, least: float) -> ScoredTree:
        """Returns the largest tree of a request."""
        tokens = request.tokens
        if self not in request.drafter_states:
            request.drafter_states[self] = State([Acceptance(rates, weight=8, memory=50) for rates in self.rates])
        state: State = request.drafter_states[self]
        state.text.append(tokens[len(state.text) :])
        texts: list[tuple[int, SuffixAutomaton | TextCorpus]] = [(OWN, state.text)]
        if self.corpus is not None:
            texts.append((CORPUS, self.corpus))
        if (earlier := self.earlier(request.adapter)) is not None:
            texts += [(EARLIER, text) for text in earlier.automata()]
        state.sources = [source for source, _ in texts]
        rates = [state.rates[source].rates() for source in state.sources]
        config, deepest = self.config, min(self.config.length, request.draft_limit)
        searched, context = [text for _, text in texts], tokens[-MATCHED:]
        state.drafts = TextDrafts(searched, context, config.nodes, deepest, config.branches, rates, least)
        return ScoredTree(*state.drafts.tree())


def _corpus_path(path: str | None, target: Transformer) -> Path | None:
    given = Path(os.path.expanduser(path)) if path else shipped_folder("suffix", target)
    return given / FILE if given and given.is_dir() else given
