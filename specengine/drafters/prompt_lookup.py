"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023).

Several earlier occurrences are merged into one tree, likeliest node first. How likely depends on how long the match
is, counting the drafted tokens that lead to the node; what the text does is compared with what was or would have been
drafted in every cycle, so the rates are learned without drafting. The tree is as large as pays by them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from specengine._C import MAX_NODES
from specengine.draft_policy.cost_model import CostModel, costs_of
from specengine.draft_policy.tree_choice import Acceptance
from specengine.draft_trees.scored_tree import ScoredTree, cut_trees
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.drafters.base import Drafter
from specengine.models.hidden_states import HiddenStates
from specengine.utils.spec_string import check_range

# A node's kind: bits of the match's length (1, 2-3, 4-7, 8-15, 16 or more tokens), then first branch or a later one.
LONGEST = 16
PRIOR = (0.2, 0.06, 0.5, 0.1, 0.7, 0.1, 0.8, 0.1, 0.9, 0.1)  # rounded from chats and code of a small model
UNLIKELY = 0.01  # below this no row is worth its cost


@dataclass(frozen=True)
class Config:
    """Lengths in tokens. nodes: largest tree, root included.  length: longest continuation drafted.
    matches: most occurrences looked at per n-gram length; on CUDA the tree is a chain, the best match's continuation.
    adaptive: draft as many nodes as pay (any choice is lossless under the rule `match`), else always the largest tree.
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


class NgramIndex:
    """Where each n-gram of a request ended, as chains from the newest back; grows with the request.

    An n-gram's end is the position of the token after it. Integers only: an object per n-gram would wake the garbage
    collector in the middle of a prompt.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.lengths = range(min_ngram, max_ngram + 1)
        self._newest: dict[int, dict[int, int]] = {n: {} for n in self.lengths}  # n-gram -> newest end
        self._earlier: dict[int, list[int]] = {n: [0] for n in self.lengths}  # end -> the one before, 0: none
        self._indexed = 0  # tokens indexed so far

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the n-grams that end before the last token: the last one has no continuation yet."""
        for end in range(self._indexed + 1, len(tokens)):
            for n, key in zip(self.lengths, self._keys(tokens, end), strict=True):
                self._earlier[n].append(self._newest[n].get(key, 0))
                if n <= end:
                    self._newest[n][key] = end
        self._indexed = max(self._indexed, len(tokens) - 1)

    def matches(self, tokens: Sequence[int], most: int) -> list[tuple[int, int]]:
        """(end, length of the match) where the last tokens occurred before, longest first, then newest.

        most: occurrences looked at per n-gram length.
        """
        found: dict[int, int] = {}
        count = len(tokens)
        for n, key in zip(self.lengths, self._keys(tokens, count), strict=True):
            end = self._newest[n].get(key, 0) if n <= count else 0
            for _ in range(most):
                if not end:
                    break
                if end not in found:
                    length = n
                    while length < min(LONGEST, end) and tokens[end - length - 1] == tokens[count - length - 1]:
                        length += 1
                    found[end] = length
                end = self._earlier[n][end]
        return sorted(found.items(), key=lambda match: (-match[1], -match[0]))

    def _keys(self, tokens: Sequence[int], end: int) -> list[int]:
        """The n-grams before `end` as integers, one per length; meaningless where n is more than end."""
        keys, key = [], 0
        for n in range(1, self.lengths[-1] + 1):
            key = key << 32 | tokens[end - n] if n <= end else 0
            if n >= self.lengths[0]:
                keys.append(key)
        return keys


@dataclass
class State:
    """What the drafter remembers of one request. found: the matches of the last cycle, at `length` tokens."""

    index: NgramIndex
    acceptance: Acceptance
    found: list[tuple[int, int]] = field(default_factory=list)
    length: int = 0


class PromptLookup(Drafter):
    """Drafts copies of earlier text; costs little and pays where the text repeats itself.

    Example: after 1 2 3 9 1 2 4 1 2 with 2-grams, the tree is 2 -> 4 -> 1 -> 2 and 2 -> 3 -> 9 -> 1.
    costs: what rows cost; by default the target's, measured.
    """

    name = "prompt_lookup"
    config_type = Config
    config: Config
    drafts_on_device = True
    proposes = True

    def __init__(self, config: Config, path: str | None, target, costs: CostModel | None = None) -> None:
        super().__init__(config, path, target)
        self._resident = target.ops.resident  # its trees are chains, and its graphs choose the width
        measured = config.adaptive and not self._resident
        self.costs = costs or costs_of(target) if measured else None
        self.acceptance = Acceptance(PRIOR, weight=20, memory=200)  # of all requests

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def drafts_chains(self) -> bool:
        config = self.config
        return self._resident or (config.matches == 1 and config.min_ngram == config.max_ngram)

    @property
    def max_nodes(self) -> int:
        return min(self.config.nodes, self.config.length + 1) if self._resident else self.config.nodes

    def propose(self, requests: Sequence) -> list[ScoredTree]:
        return [self._grown(request) for request in requests]

    def draft(self, requests: Sequence) -> list[DraftTree]:
        prefix = sum(len(request.tokens) for request in requests) / max(1, len(requests))
        return cut_trees(self.propose(requests), self.costs, prefix).trees

    def rest(self, requests: Sequence) -> None:
        for request in requests:
            if request.drafter_state:
                request.drafter_state.found = []

    def draft_on_device(self, slots) -> TreeBatch:
        """A chain: the continuation of the longest match."""
        return slots.lookup(ngrams=(self.config.min_ngram, LONGEST))

    def observe(self, requests: Sequence, committed: Sequence[list[int]], hidden_states: HiddenStates | None) -> None:
        if self.costs is None:
            return
        for request, tokens in zip(requests, committed, strict=True):
            state = request.drafter_state
            matches = state.found if state else []  # it may never have been asked
            for token in tokens if matches else ():
                branches = _branches(matches, request.tokens, state.length)
                for kind, branch, _ in branches:
                    state.acceptance.observe(kind, branch == token)
                matches = next((rest for _, branch, rest in branches if branch == token), None)
                if not matches:
                    break

    def release(self, request) -> None:
        request.drafter_state = None  # an index: its request waits for the others of its call

    def _grown(self, request) -> ScoredTree:
        """The largest tree there is, best first."""
        config, tokens = self.config, request.tokens
        if request.drafter_state is None:
            acceptance = Acceptance(self.acceptance, weight=8, memory=50)
            request.drafter_state = State(NgramIndex(config.min_ngram, config.max_ngram), acceptance)
        state = request.drafter_state
        state.index.extend(tokens)
        state.found, state.length = state.index.matches(tokens, config.matches), len(tokens)
        rates = state.acceptance.rates()
        least = 0.0 if self.costs is None else UNLIKELY
        deepest = min(config.length, request.draft_limit)
        drafted, parents, chances = [tokens[-1]], [-1], [1.0]
        waiting: list[tuple] = []  # a heap of (-probability, number, parent, depth, token, chance, matches)
        node, depth, probability, matches, number = 0, 0, 1.0, state.found, 0
        while len(drafted) < config.nodes:
            if depth < deepest:
                for kind, token, rest in _branches(matches, tokens, state.length):
                    number += 1  # equals in the order they came
                    reach, chance = probability * rates[kind], rates[kind]
                    heapq.heappush(waiting, (-reach, number, node, depth + 1, token, chance, rest))
            if not waiting or -waiting[0][0] < least:
                break
            probability, _, parent, depth, token, chance, matches = heapq.heappop(waiting)
            probability, node = -probability, len(drafted)
            drafted.append(token)
            parents.append(parent)
            chances.append(chance)
        return ScoredTree(drafted, parents, chances)


def _branches(
    matches: list[tuple[int, int]], tokens: Sequence[int], count: int
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """(kind, token, its matches one token further) of each token that follows a match in tokens[:count]."""
    following: dict[int, list[tuple[int, int]]] = {}
    for end, length in matches:
        if end < count:
            following.setdefault(tokens[end], []).append((end + 1, length + 1))
    branches: list[tuple[int, int, list[tuple[int, int]]]] = []
    for token, rest in following.items():
        bits = min(LONGEST, rest[0][1] - 1).bit_length()
        branches.append((2 * (bits - 1) + bool(branches), token, rest))
    return branches
