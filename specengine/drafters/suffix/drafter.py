"""Suffix: what followed the longest repeated context most often, in this text, in a corpus and in earlier requests.

(SuffixDecoding, Oliaro et al. 2024; with a corpus REST, He et al. 2023.) Each source drafts a tree of its own, and the
trees are joined. How likely a node is depends on how long its match is and how often its token followed; what the text
does is compared with what was or would have been drafted in every cycle, so these rates are learned without drafting.
The tree is as large as pays by them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from specengine._C import DEEPEST, MATCHED, MAX_NODES, SuffixAutomaton, TextCorpus
from specengine.draft_policy.agreement import Agreement, JointTree
from specengine.draft_policy.cost_model import CostModel, costs_of
from specengine.draft_policy.tree_choice import Acceptance
from specengine.draft_trees.scored_tree import ScoredTree, cut_trees, judged
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.base import Drafter
from specengine.drafters.shipped import shipped
from specengine.drafters.source_stats import count_sources
from specengine.drafters.suffix.corpus_file import check_corpus_tokenizer, open_corpus
from specengine.drafters.suffix.text_memory import TextMemory
from specengine.models.hidden_states import HiddenStates
from specengine.utils.spec_string import check_range

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer
    from specengine.tokenizer import Tokenizer

FILE = "corpus.safetensors"  # of a folder
UNLIKELY = 0.01  # below this no row is worth its cost
# By the match's length (rows) and what followed it: one token once, one more often, one most of the time or less often,
# another token as often or less often. Rounded from chats and code of a small model.
PRIOR = (
    *(0.2, 0.4, 0.3, 0.2, 0.1, 0.05),
    *(0.4, 0.7, 0.4, 0.2, 0.1, 0.1),
    *(0.6, 0.8, 0.5, 0.3, 0.15, 0.1),
    *(0.8, 0.9, 0.5, 0.3, 0.15, 0.1),
    *(0.9, 0.95, 0.7, 0.4, 0.1, 0.05),
)
OWN, CORPUS, EARLIER = SOURCES = range(3)
NAMES = ("text", "corpus", "earlier")


@dataclass(frozen=True)
class Config:
    """nodes: largest tree, root included.  length: longest continuation drafted.  branches: of a node, at most.
    corpus: search the one that comes with the package, where none is given.  remember: search answers to earlier
    requests, too: the last so many tokens of them (up to twice as many).
    adaptive: draft as many nodes as pay (any choice is lossless under the rule `match`), else always the largest tree.
    """

    nodes: int = 16
    length: int = 15
    branches: int = 4
    corpus: bool = True
    remember: int = 0
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_range("nodes", self.nodes, 2, MAX_NODES)
        check_range("length", self.length, 1, DEEPEST)
        check_range("branches", self.branches, 1, MAX_NODES - 1)
        check_range("remember", self.remember, 0, 1 << 22)


@dataclass
class State:
    """What the drafter remembers of one request. text: all of it but the tokens since the last draft.
    rates: by source, how often which kind of node was right.  drafted: of the last draft, by source: the tree and the
    kinds of its nodes.  joints: how the trees were joined.  tree: what draft() made of them.
    """

    rates: list[Acceptance]
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    drafted: list[tuple[int, ScoredTree, list[int]]] = field(default_factory=list)
    joints: list[tuple[Agreement, JointTree]] = field(default_factory=list)
    tree: DraftTree | None = None


class Suffix(Drafter):
    """Drafts copies, by how often they were said before.

    path: of a corpus, see `specengine corpus`, or of a folder with one.
    costs: what rows cost; by default the target's, measured.
    """

    name = "suffix"
    config_type = Config
    config: Config
    takes_path = True
    proposes = True

    def __init__(self, config: Config, path: str | None, target, costs: CostModel | None = None) -> None:
        super().__init__(config, path, target)
        if path and not config.corpus:
            raise ValueError(f"corpus: false, but {path} is given as one")
        measured = config.adaptive and not target.ops.resident
        self.costs = costs or costs_of(target) if measured else None
        self._path = _corpus_path(path, target) if config.corpus else None
        self.corpus = open_corpus(self._path, target.config.vocab_size) if self._path else None
        self.earlier = TextMemory(config.remember) if config.remember else None
        # of all requests
        self.rates = [Acceptance(PRIOR, weight=20, memory=1000) for _ in SOURCES]
        self.agreements = [Agreement() for _ in SOURCES]  # of a source with those before it

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is not None and self._path is not None:
            check_corpus_tokenizer(self._path, tokenizer)

    def propose(self, requests: Sequence) -> list[ScoredTree]:
        return [self._grown(request) for request in requests]

    def draft(self, requests: Sequence) -> list[DraftTree]:
        prefix = sum(len(request.tokens) for request in requests) / max(1, len(requests))
        trees = cut_trees(self.propose(requests), self.costs, prefix, self.config.nodes - 1).trees
        for request, tree in zip(requests, trees, strict=True):
            request.drafter_state.tree = tree
        return trees

    def rest(self, requests: Sequence) -> None:
        for request in requests:
            if state := request.drafter_state:
                state.drafted, state.joints = [], []

    def observe(self, requests: Sequence, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        for request, tokens in zip(requests, committed, strict=True):
            state = request.drafter_state
            if state is None:  # it was never asked
                continue
            sources = [(NAMES[source], tree) for source, tree, _ in state.drafted]
            count_sources(request, state.tree, sources, tokens)
            if self.costs is not None:
                for source, tree, kinds in state.drafted:
                    for node, accepted in judged(tree, tokens):
                        state.rates[source].observe(kinds[node], accepted)
                for agreement, joint in state.joints:
                    agreement.observe(joint, tokens)
            state.drafted, state.joints = [], []

    def release(self, request) -> None:
        if self.earlier is not None and len(request.tokens) > request.prompt_length:
            self.earlier.add(request.tokens[max(0, request.prompt_length - MATCHED) :])
        request.drafter_state = None  # an automaton: its request waits for the others of its call

    def _grown(self, request) -> ScoredTree:
        """The largest tree there is."""
        tokens = request.tokens
        if request.drafter_state is None:
            request.drafter_state = State([Acceptance(rates, weight=8, memory=50) for rates in self.rates])
        state = request.drafter_state
        state.text.append(tokens[len(state.text) :])
        state.drafted, state.joints = [], []
        context, limit = tokens[-MATCHED:], request.draft_limit
        tree = self._continued(state, OWN, state.text, context, limit)
        others: list[tuple[int, SuffixAutomaton | TextCorpus]] = []
        if self.corpus is not None:
            others.append((CORPUS, self.corpus))
        if self.earlier is not None:
            others += [(EARLIER, text) for text in self.earlier.automata()]
        for source, text in others:
            more = self._continued(state, source, text, context, limit)
            if len(more.tokens) > 1:
                joint = self.agreements[source].joined(tree, more)
                state.joints.append((self.agreements[source], joint))
                tree = joint.tree
        return tree

    def _continued(
        self, state: State, source: int, text: SuffixAutomaton | TextCorpus, context: list[int], limit: int
    ) -> ScoredTree:
        config, rates = self.config, state.rates[source].rates()
        least = 0.0 if self.costs is None else UNLIKELY
        deepest = min(config.length, limit)
        nodes, parents, kinds = text.continuations(context, config.nodes, deepest, config.branches, rates, least)
        tree = ScoredTree(nodes, parents, [1.0, *(rates[kind] for kind in kinds[1:])])
        state.drafted.append((source, tree, kinds))
        return tree


def _corpus_path(path: str | None, target: Transformer) -> Path | None:
    given = Path(os.path.expanduser(path)) if path else shipped("suffix", target)
    return given / FILE if given and given.is_dir() else given
