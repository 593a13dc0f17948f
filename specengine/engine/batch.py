"""A batch on the host: the requests of a cycle, with their parameters and histories as the ops take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from specengine.draft_policy.draft import Draft
from specengine.draft_policy.forced import ForcedPolicy
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch, TreeLayout
from specengine.drafters.drafter import Drafter
from specengine.engine.constrained import ConstrainedTrees
from specengine.engine.cycle import Cycle
from specengine.engine.request import NoToken, Request
from specengine.models.hidden_states import HiddenStates
from specengine.ops.row_tools import likeliest
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.verify_tree import Accepted, VerifyWorkspace, without_token
from specengine.rules import Rule
from specengine.rules.lossless import Match
from specengine.types import ConstraintFailed
from specengine.utils.timers import HostClock


class Batch:
    """Runs the cycles of a fixed set of requests; the scheduler makes a new batch when the set changes.

    forced: how many forced tokens pay, as earlier batches learned it.
    """

    def __init__(self, requests: Sequence[Request], cycle: Cycle, forced: ForcedPolicy | None = None) -> None:
        self.requests, self._cycle = list(requests), cycle
        self._layout = TreeLayout(cycle.target.device)
        lengths, adapters = [len(r.tokens) - 1 for r in requests], [r.adapter_index for r in requests]
        self.cache = cycle.cache.batch([r.pages for r in requests], lengths, adapters, final=False)
        self.params = SamplingTable.of([r.params for r in requests], [r.seed for r in requests])
        longest = max((r.prompt_length + r.limit for r in requests), default=1)
        self.history = TokenHistory.of([r.tokens for r in requests], [r.prompt_length for r in requests], longest)
        # numpy writes a few integers in a fraction of the time that a tensor takes
        self._texts, self._lengths = self.history.tokens.numpy(), self.history.length.numpy()
        vocab, weights = cycle.target.config.vocab_size, not isinstance(cycle.rule, Match)
        self.workspace = VerifyWorkspace.empty(len(self.requests), vocab, weights=weights)
        constrained = any(request.constraint for request in self.requests)
        # Such drafters read the likeliest of all tokens, and log-probabilities are those of the whole vocabulary.
        reads_all = cycle.drafter.reads_choices or any(r.params.logprobs for r in requests)
        self.reads_forbidden = constrained and reads_all
        some = any(r.params.reads_logits for r in requests)
        self.reads_logits = cycle.rule.reads_logits or self.reads_forbidden or some
        self.draft_logits: DraftLogits | None = None
        self.masks: torch.Tensor | None = None
        self._fitted: ConstrainedTrees | None = None
        self._no_draft: ValueError | None = None
        if constrained:
            self._fitted = ConstrainedTrees(self.requests, vocab, cycle.drafter, forced or ForcedPolicy())

    def step(self) -> dict[str, float]:
        """Runs one cycle and returns the seconds of its phases."""
        self._clock = HostClock()
        with slots_in_flux(self.requests):
            self._cycle.run(self)
        if self._fitted:
            seconds = self._clock.seconds
            self._fitted.observe(self._paths, sum(seconds.values()), seconds.get("draft", 0.0), self._draft.experts)
        for request in self.requests:
            request.stats.count_time(self._clock.seconds, finished=bool(request.finish_reason))
        return self._clock.seconds

    def close(self) -> None:
        """Does nothing: no cycle is under way between two steps."""

    def mark(self, phase: str) -> None:
        """Ends a phase of the cycle."""
        self._clock.mark(phase)

    def draft(self, drafter: Drafter, rule: Rule) -> TreeBatch:
        """Drafts one tree per request.

        Where a drafter meets rows that are not numbers, all trees are roots: the walk finds the request with such rows.
        If there is none, commit() raises ValueError naming the drafter, whose weights are not numbers.
        """
        try:
            self._draft, self._no_draft = drafter.draft_for(rule.wants, self.requests), None
        except ValueError as error:
            self._no_draft = ValueError(f"drafter {drafter.name}: {error}")
            self._draft = Draft(self.requests, [DraftTree(r.tokens[-1:], [-1]) for r in self.requests])
        if self._fitted:
            self._draft = self._fitted.fit(self._draft)
        self.draft_logits = self._draft.logits
        return self._layout.of(self._draft.trees)

    def fill_masks(self, tree: TreeBatch) -> None:
        """Waits for the masks, which were computed while the target ran."""
        if self._fitted:
            self.masks = self._fitted.masks()

    def commit(self, tree: TreeBatch, accepted: Accepted, scores: torch.Tensor) -> None:
        """Appends accepted tokens and bonus tokens; cuts the path of a request that ends inside of it.

        Fails a request without a bonus token alone.
        """
        self._committed, self._rows, self._scores, self._paths = [], [], scores, []
        columns = (accepted.path, accepted.path_length, accepted.bonus, accepted.relaxed)
        paths, lengths, bonuses, relaxed = (column.tolist() for column in columns)
        if self._no_draft and min(bonuses) >= 0:
            raise self._no_draft
        first = 0  # row of the request's root
        for b, (request, draft) in enumerate(zip(self.requests, self._draft.trees, strict=True)):
            path = paths[b][: lengths[b]]
            if bonuses[b] < 0:
                kept = []
                request.fail(NoToken(without_token(b, accepted, tree, self.history, self.draft_logits)))
            else:
                kept = commit_path(request, draft, path, bonuses[b], scores.__getitem__, first, relaxed[b])
            end = len(request.tokens)
            for at, token in enumerate(kept, start=end - len(kept)):
                self._texts[b, at] = token
            self._lengths[b] = end
            if len(kept) < lengths[b]:
                accepted.path_length[b] = len(kept)
            self._committed.append(kept)
            self._paths.append(path[: len(kept)])
            self._rows += [first + node for node in path[: len(kept)]]
            first += len(draft.tokens)
        self.cache.advance(accepted.path_length)

    def observe(self, drafter: Drafter, hidden_states: HiddenStates) -> None:
        """Shows the drafter the committed tokens, and what else it reads of the target's pass."""
        draft = self._draft
        draft.experts = hidden_states.experts_per_layer
        if draft.experts is not None:
            for request in self.requests:
                request.stats.count_experts(draft.experts)
        if drafter.reads_choices and any(len(tree.tokens) > 1 for tree in self._draft.trees):
            chosen = likeliest_tokens(self._scores)
            ends = accumulate(len(tree.tokens) for tree in self._draft.trees)
            choices = [
                chosen[end - len(tree.tokens) : end] if kept else []  # a request that failed has rows without a choice
                for end, tree, kept in zip(ends, self._draft.trees, self._committed, strict=True)
            ]
            drafter.observe_choices(draft, self._committed, choices)
        of_path = hidden_states.rows(self._rows) if drafter.reads_hidden_states else None
        drafter.observe(draft, self._committed, of_path)


@contextmanager
def slots_in_flux(requests: Sequence[Request]) -> Iterator[None]:
    """Marks no slot as final during a cycle: an exception leaves an unknown part of it done."""
    for request in requests:
        request.cached = 0
    yield
    for request in requests:
        request.cached = len(request.tokens) - 1


def likeliest_tokens(scores: torch.Tensor) -> list[int]:
    """Returns the likeliest token of each row.  scores: TargetOutput.scores."""
    return scores.tolist() if scores.dim() == 1 else [token for (token,) in likeliest(scores, 1)]


def advance(request: Request, tokens: Sequence[int]) -> None:
    """Takes committed tokens through the request's grammar; ends the request where that fails."""
    assert request.constraint is not None
    try:
        request.constraint.advance(tokens)
    except ConstraintFailed as failure:
        request.fail(failure)


def commit_path(
    request: Request,
    tree: DraftTree,
    path: list[int],
    bonus: int,
    logits_of: Callable[[list[int]], torch.Tensor],
    first_row: int,
    relaxed: int,
) -> list[int]:
    """Appends an accepted path and the bonus token to a request; returns the tokens it kept.

    logits_of: gives the logits of rows of the target's pass.  first_row: the row of the request's root.
    relaxed: accepted tokens that the exact rule refuses.
    """
    kept = request.commit([tree.tokens[node] for node in path[1:]], bonus)
    if request.constraint:
        advance(request, kept)
    request.count_cycle(tree, min(len(kept), len(path) - 1), relaxed)
    if request.params.trace:
        request.record_trace(tree, path, len(kept), bonus)
    if request.params.logprobs:
        request.record_logprobs(logits_of([first_row + node for node in path[: len(kept)]]).cpu(), kept)
    return kept
