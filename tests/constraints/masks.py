"""Masks as sets of tokens, and the masks that a fresh matcher computes."""

from __future__ import annotations

import numpy as np

from specengine.constraints import Constraint
from specengine.constraints.grammars import compiled_form
from specengine.constraints.vocabulary import read_vocabulary
from specengine.draft_trees.tree import DraftTree
from specengine.types import SamplingParams
from tests.constraints.vocabulary import ENDS, TOKENIZER

VOCAB, WORDS = 320, 10


def tokens_of(row: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def masks_of(constraint: Constraint, tree: DraftTree) -> list[list[int]]:
    rows = np.zeros((len(tree.tokens), WORDS), dtype=np.int32)
    constraint.fill(tree, rows)
    return [tokens_of(row) for row in rows]


def allowed_tokens(constraint: Constraint) -> list[int]:
    """What may follow the committed tokens."""
    return masks_of(constraint, DraftTree([0], [-1]))[0]


class FreshMatchers:
    """Masks by one new matcher for every text: no state is ever taken back."""

    def __init__(self, params: SamplingParams) -> None:
        from llguidance import LLMatcher

        vocabulary = read_vocabulary(TOKENIZER, ENDS, VOCAB)
        self._new = lambda: LLMatcher(vocabulary, compiled_form(params), log_level=0)
        self._known: dict[tuple[int, ...], list[int] | None] = {}

    def __call__(self, text: tuple[int, ...]) -> list[int] | None:
        """Returns what may follow a text; None for a text that is not allowed itself."""
        if text not in self._known:
            if text and (self._known[text[:-1]] is None or text[-1] not in self._known[text[:-1]]):
                self._known[text] = None
            else:
                matcher = self._new()
                assert matcher.consume_tokens([*text]), matcher.get_error()
                row = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
                self._known[text] = tokens_of(row) if not matcher.is_stopped() else sorted(ENDS)
        return self._known[text]

    def after(self, text) -> list[int] | None:
        """As __call__, for a text of which no shorter one was asked."""
        for end in range(len(text) + 1):
            found = self(tuple(text[:end]))
        return found
