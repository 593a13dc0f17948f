"""The constrained requests of a batch on the host: what they verify, and the masks, computed while the target runs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import accumulate

import torch

from specengine._C import MAX_NODES
from specengine.constraints.background import begin_fill, finish_fills
from specengine.constraints.cut_tree import CutTree
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.forced import ForcedPolicy, ForcedRun
from specengine.draft_trees.token_masks import mask_words
from specengine.draft_trees.tree import DraftLogits, DraftTree
from specengine.drafters.drafter import Drafter
from specengine.engine.request import Request
from specengine.types import SourceStats

SOURCE = "grammar"  # of forced tokens, among the sources of a request's drafts


class ConstrainedTrees:
    """Fits the trees of a batch to its grammars, cycle after cycle.  vocab_size: of the model."""

    def __init__(self, requests: Sequence[Request], vocab_size: int, drafter: Drafter, policy: ForcedPolicy) -> None:
        self._requests, self._drafter, self._policy = requests, drafter, policy
        self._rows = torch.empty(0, mask_words(vocab_size), dtype=torch.int32)
        self._under_way: list[Future[None]] = []
        self._cuts: list[CutTree] = []

    def fit(self, draft: Draft) -> Draft:
        """Cuts what the grammars forbid, adds what they force as far as it pays, and begins to compute the masks."""
        if self._drafter.max_nodes == 1:  # plain decoding stays plain
            self._start(draft.trees)
            return draft
        whole = self._drafter.reads_choices  # which reads the target's tokens after forbidden nodes too
        pairs = list(zip(self._requests, draft.trees, strict=True))
        self._cuts = [
            request.constraint.cut(tree, whole) if request.constraint else CutTree(tree, [*range(len(tree.tokens))], [])
            for request, tree in pairs
        ]
        self._grow()
        fitted = [cut.tree for cut in self._cuts]
        self._start(fitted)
        logits = draft.logits and self._fitted_logits(draft.trees, draft.logits)
        return replace(draft, trees=fitted, logits=logits)

    def masks(self) -> torch.Tensor:
        """Returns the masks, int32 [M, W], valid until the next fit(); rows without a constraint are all ones."""
        under_way, self._under_way = self._under_way, []
        finish_fills(under_way)
        return self._rows[: self._size]

    def observe(
        self, paths: Sequence[Sequence[int]], seconds: float, drafting: float, experts: float | None = None
    ) -> None:
        """Learns from a cycle.  paths: committed nodes of each request, root first.  drafting: of its seconds.

        experts: that each layer read, in the mean; None: without counts.
        """
        if not self._cuts:
            return
        for request, cut, path in zip(self._requests, self._cuts, paths, strict=True):
            for leaf, _ in cut.forced:
                self._policy.observe_leaf(_depth(cut.tree, leaf), leaf in path)
            forced = cut.drafted.count(-1)
            if forced:
                _count_forced(request, forced, [at for at, node in enumerate(path[1:]) if cut.drafted[node] < 0])
        tokens = sum(map(len, paths))
        self._policy.observe(len(paths), self._prefix, self._nodes, tokens, seconds, drafting, experts)

    @property
    def _nodes(self) -> int:
        return sum(len(cut.tree.tokens) - 1 for cut in self._cuts)

    @property
    def _prefix(self) -> float:
        return sum(len(request.tokens) for request in self._requests) / len(self._requests)

    def _grow(self) -> None:
        """Adds forced tokens: no deeper than the request goes, no wider than its pages and a tree allow."""
        spare, limits = self._drafter.spare_slots, [request.draft_limit for request in self._requests]
        sizes = [len(cut.tree.tokens) for cut in self._cuts]
        rooms = [min(MAX_NODES, limit + 1 + spare) - size for limit, size in zip(limits, sizes, strict=True)]
        runs = []
        for number, (cut, limit) in enumerate(zip(self._cuts, limits, strict=True)):
            for leaf, text in cut.forced:
                depth = _depth(cut.tree, leaf)
                runs.append(ForcedRun(number, depth, max(0, min(len(text), limit - depth))))
        if runs:
            lengths = iter(self._policy.lengths(runs, rooms, self._nodes, self._prefix))
            self._cuts = [cut.grown([next(lengths) for _ in cut.forced]) for cut in self._cuts]

    def _start(self, trees: Sequence[DraftTree]) -> None:
        starts = list(accumulate((len(tree.tokens) for tree in trees), initial=0))
        if len(self._rows) < starts[-1]:
            self._rows = self._rows.new_empty(starts[-1], self._rows.shape[1])
        self._size, rows = starts[-1], self._rows[: starts[-1]].numpy()
        for request, tree, first in zip(self._requests, trees, starts, strict=False):
            own = rows[first : first + len(tree.tokens)]
            if request.constraint is None:
                own[:] = -1
            elif len(rows) == 1:  # waking a thread takes as long as one mask
                request.constraint.fill(tree, own)
            else:
                self._under_way.append(begin_fill(request.constraint, tree, own))

    def _fitted_logits(self, trees: Sequence[DraftTree], logits: DraftLogits) -> DraftLogits:
        """Returns the distributions of the fitted trees' nodes: a forced node has none."""
        old, rows, first = logits.rows.tolist(), list[int](), 0
        for tree, cut in zip(trees, self._cuts, strict=True):
            rows += [old[first + number] if number >= 0 else -1 for number in cut.drafted]
            first += len(tree.tokens)
        return replace(logits, rows=torch.tensor(rows, dtype=torch.int32))


def _depth(tree: DraftTree, node: int) -> int:
    depth = 0
    while node:
        node, depth = tree.parents[node], depth + 1
    return depth


def _count_forced(request: Request, verified: int, accepted: Sequence[int]) -> None:
    """Counts forced tokens as drafts of their own source.  accepted: their places among the accepted tokens."""
    stats = request.sources.setdefault(SOURCE, SourceStats())
    stats.drafted += verified
    stats.accepted += len(accepted)
    if request.trace:
        last = request.trace[-1]
        names = [*last.sources, *[()] * (len(last.accepted) - len(last.sources))]
        for at in accepted:
            if at < len(names):
                names[at] = (*names[at], SOURCE)
        request.trace[-1] = replace(last, sources=tuple(names))
