"""Prompt lookup: what followed the last few tokens when they occurred before (Saxena 2023).

Several earlier occurrences are merged into one tree, longest match first, newest first, so that a continuation that
varied is drafted in its variants. The tree grows and shrinks with what this sequence accepted lately: rows that are
not accepted cost time, and text that copies does so for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specengine._C import MAX_NODES
from specengine.drafters.base import Drafter
from specengine.options import check_range
from specengine.tree import DraftTree

RECENT = 0.3  # weight of the newest cycle in the running mean


@dataclass(frozen=True)
class Config:
    """Lengths in tokens. nodes: largest tree, root included.  length: longest continuation drafted.
    matches: most occurrences looked at per n-gram length.
    adaptive: draft fewer nodes where few are accepted (any choice is lossless under the rule `match`)."""

    max_ngram: int = 4
    min_ngram: int = 2
    nodes: int = 12
    length: int = 11
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
class NgramIndex:
    """Where each n-gram of a sequence ended: position of the token after it, oldest first. Grows with the sequence."""

    after: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    indexed: int = 0  # tokens indexed so far

    def extend(self, tokens: Sequence[int], min_ngram: int, max_ngram: int) -> None:
        """Indexes the n-grams that end before the last token: the last one has no continuation yet."""
        for end in range(self.indexed + 1, len(tokens)):
            for n in range(min_ngram, min(max_ngram, end) + 1):
                self.after.setdefault(tuple(tokens[end - n : end]), []).append(end)
        self.indexed = max(self.indexed, len(tokens) - 1)


@dataclass
class State:
    """What the drafter remembers of one sequence. accepted: running mean per drafting cycle."""

    index: NgramIndex
    accepted: float
    drafted: int = 0  # nodes of the last tree beside the root

    def budget(self, nodes: int) -> int:
        """Nodes worth drafting: twice what is accepted, root included, never nothing."""
        return min(nodes, max(2, round(2 * self.accepted + 1.5)))


class PromptLookup(Drafter):
    """Drafts copies of earlier text; costs nothing and pays where the text repeats itself.

    Example: after 1 2 3 9 1 2 4 1 2 with 2-grams, the tree is 2 -> 4 -> 1 -> 2 and 2 -> 3 -> 9 -> 1.
    """

    name = "prompt_lookup"
    Config = Config

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    def draft(self, sequences: Sequence) -> list[DraftTree]:
        return [self._draft_one(sequence) for sequence in sequences]

    def _draft_one(self, sequence) -> DraftTree:
        config, tokens = self.config, sequence.tokens
        if sequence.drafter_state is None:
            sequence.drafter_state = State(NgramIndex(), accepted=config.nodes / 2)  # the first tree is a full one
        state = sequence.drafter_state
        tree = self._tree(state.index, tokens, sequence.draft_limit, self._budget(state))
        state.drafted = len(tree.tokens) - 1
        return tree

    def _budget(self, state: State) -> int:
        return state.budget(self.config.nodes) if self.config.adaptive else self.config.nodes

    def observe(self, sequences: Sequence, committed: Sequence[list[int]], features: torch.Tensor | None) -> None:
        for sequence, tokens in zip(sequences, committed, strict=True):
            state = sequence.drafter_state
            if state.drafted:
                state.accepted += RECENT * (len(tokens) - 1 - state.accepted)

    def _tree(self, index: NgramIndex, tokens: list[int], limit: int, budget: int) -> DraftTree:
        config = self.config
        index.extend(tokens, config.min_ngram, config.max_ngram)
        length = min(config.length, limit)
        node_tokens, parents = [tokens[-1]], [-1]
        children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        for n in range(min(config.max_ngram, len(tokens)), config.min_ngram - 1, -1):
            ends = index.after.get(tuple(tokens[-n:]), ())
            for end in reversed(ends[-config.matches :]):
                node = 0
                for token in tokens[end : end + length]:
                    key = (node, token)
                    if key not in children:
                        if len(node_tokens) == budget:
                            return DraftTree(node_tokens, parents)
                        children[key] = len(node_tokens)
                        node_tokens.append(token)
                        parents.append(node)
                    node = children[key]
        return DraftTree(node_tokens, parents)
