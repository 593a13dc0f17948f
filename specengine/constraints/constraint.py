"""The grammar of one request: which tokens it allows after the committed tokens, and after drafted ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from specengine.constraints.cut_tree import CutTree, ForcedText
from specengine.draft_trees.token_masks import mask_of
from specengine.draft_trees.tree import DraftTree
from specengine.types import ConstraintFailed, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

T = TypeVar("T")


class GrammarConstraint:
    """Follows one text through its grammar. What is drafted is tried and taken back; committed tokens stay.

    start: a matcher at the beginning of the text, which other constraints share.  eos_token_ids: end the text; they are
    allowed where the grammar may end.  params: under ignore_eos they are allowed only where it must end, and so among
    the first min_tokens, with stop_token_ids.
    """

    def __init__(
        self, start: LLMatcher, eos_token_ids: Collection[int], vocab_size: int, params: SamplingParams
    ) -> None:
        self._start, self._matcher = start, start.deep_copy()
        self._eos, self._vocab_size, self._params = frozenset(eos_token_ids), vocab_size, params
        self._ignore_eos, self._least = params.ignore_eos, params.min_tokens
        self._ends = mask_of(self._eos, vocab_size)  # the mask of nothing but the end
        self._ends_and_stops = self._ends | mask_of(params.stop_token_ids, vocab_size)
        self._text: list[int] = []  # that the matcher has read
        self._tried: list[int] = []  # behind the text
        self._failed = False  # the last question to the matcher
        self._doubtful = False  # a mask could not be computed
        self._broken: BaseException | None = None  # what the grammar engine raised

    def fresh(self) -> GrammarConstraint:
        """See Constraint."""
        return GrammarConstraint(self._start, self._eos, self._vocab_size, self._params)

    def cut(self, tree: DraftTree, whole: bool = False) -> CutTree:
        """Leaves out the nodes that are not allowed, and finds the text that must follow where the tree ends.

        whole: keep all nodes.  A forced text is cut into tokens once, where it begins. Its masks are asked for token by
        token, and may cut the rest in another way; then the chain ends there.
        """
        forced: dict[int, list[int]] = {}
        allowed = [*range(len(tree.tokens))]
        with self._watched():
            allowed = sorted(self._allowed(tree, forced))
        inner = {tree.parents[node] for node in allowed}
        kept = [*range(len(tree.tokens))] if whole else allowed
        place = {node: new for new, node in enumerate(kept)}
        texts = [ForcedText(place[node], forced[node]) for node in allowed if node not in inner and forced.get(node)]
        return CutTree.of(tree, kept, texts)

    def fill(self, tree: DraftTree, rows: np.ndarray) -> None:
        """Writes the mask of every node: which tokens may follow it.

        The matcher is asked at every node, in a forced text too, so a mask depends on the node's path alone.

        rows: int32 [nodes, W], contiguous; bit t % 32 of word t // 32 for token t. Rows of nodes that are not allowed
        themselves are all ones: no walk reaches them.
        """
        rows[:] = -1
        with self._watched():
            for node in self._allowed(tree):
                if node and tree.tokens[node] in self._eos:
                    rows[node] = self._ends
                else:
                    self._fill_row(rows[node])

    def advance(self, tokens: Sequence[int]) -> None:
        """Goes on by committed tokens. Raises ConstraintFailed where the grammar engine gives up."""
        with self._watched():
            if self._doubtful:
                self._check(tokens)
            self._read(tokens)
        if self._broken is not None:
            raise ConstraintFailed(f"constraint: the grammar engine failed: {self._broken}") from self._broken

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Keeps what the grammar engine raises for advance(): it fails this request and not its batch."""
        try:
            yield
        except (ConstraintFailed, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the grammar engine is no Exception
            self._broken = error

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self._eos and not self._takes(token):
                raise ConstraintFailed(f"constraint: {self._failure(token) or 'a token that it forbids'}")
        self._text += self._tried
        self._tried = []

    def _allowed(self, tree: DraftTree, forced: dict[int, list[int]] | None = None) -> Iterator[int]:
        """Yields the allowed nodes, depth first, while the matcher stands there; of an end of the text, before it.

        forced: gets the tokens that must follow each node; children that are others are not allowed then.
        """
        if forced is not None:
            forced[0] = self._forced()
        if len(tree.tokens) == 1:
            yield 0
            return
        children: list[list[int]] = [[] for _ in tree.tokens]
        for node, parent in enumerate(tree.parents):
            if node:
                children[parent].append(node)
        yield 0
        branches = [iter(children[0])]
        while branches:
            if not (node := next(branches[-1], 0)):
                branches.pop()
                if branches:
                    self._take_back()
                continue
            token, must = tree.tokens[node], forced[tree.parents[node]] if forced else []
            if must and must[0] != token:
                continue
            if token in self._eos:
                if self._may_end():
                    yield node
            elif self._takes(token):
                if forced is not None:
                    forced[node] = must[1:] or self._forced()
                yield node
                branches.append(iter(children[node]))

    def _may_end(self) -> bool:
        return self._must_end() or (self._avoided is None and self._matcher.is_accepting())

    @property
    def _avoided(self) -> np.ndarray | None:
        """The mask of tokens that are allowed only where nothing else is."""
        if len(self._text) + len(self._tried) < self._least:
            return self._ends_and_stops
        return self._ends if self._ignore_eos else None

    def _must_end(self) -> bool:
        return self._matcher.is_stopped() and self._matcher.is_accepting()  # an error stops the matcher too

    def _takes(self, token: int) -> bool:
        """Goes on by one token if the grammar allows it."""
        taken = self._healthy(lambda matcher: matcher.try_consume_tokens([token]))
        if taken:
            self._tried.append(token)
        return bool(taken)

    def _forced(self) -> list[int]:
        return self._healthy(lambda matcher: matcher.compute_ff_tokens()) or []

    def _take_back(self) -> None:
        self._tried.pop()
        self._matcher.rollback(1)

    def _fill_row(self, row: np.ndarray) -> None:
        if self._must_end():
            row[:] = self._ends
            return
        self._healthy(lambda matcher: matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes))
        if self._failed:
            row[:] = -1
            self._doubtful = True
        elif (avoided := self._avoided) is not None and (others := row & ~avoided).any():
            row[:] = others

    def _healthy(self, ask: Callable[[LLMatcher], T]) -> T | None:
        """Asks the matcher; where that reaches a limit, asks a new one that has read the same text and nothing else.

        So whether a text fails depends on the text alone, and not on drafts. None: the new one fails too.
        """
        answer = ask(self._matcher)
        self._failed = False
        if self._matcher.is_error():
            self._restore()
            answer = ask(self._matcher)
            if self._matcher.is_error():
                self._failed = True
                self._restore()
                return None
        return answer

    def _restore(self) -> None:
        self._matcher = self._start.deep_copy()
        self._matcher.try_consume_tokens([*self._text, *self._tried])

    def _check(self, tokens: Sequence[int]) -> None:
        """Raises ConstraintFailed where a committed token came from a mask that could not be computed."""
        self._doubtful, row = False, np.empty_like(self._ends)
        for place, token in enumerate(tokens):
            self._fill_row(row)
            if self._doubtful:
                error = self._failure()
                raise ConstraintFailed(f"constraint: {error} after {len(self._text) + place} tokens")
            if token not in self._eos:
                self._takes(token)
        while self._tried:
            self._take_back()

    def _failure(self, *more: int) -> str:
        """Returns what the grammar engine says of the text, and of the tokens behind it."""
        matcher = self._start.deep_copy()
        matcher.try_consume_tokens([*self._text, *self._tried, *more])
        matcher.compute_bitmask()
        return reason(matcher)


def reason(matcher: LLMatcher) -> str:
    """Returns what a matcher says of its error; empty where it has none."""
    return matcher.get_error().replace("<non-verbose/>", "").strip()
