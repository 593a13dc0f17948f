"""The requests that share a cycle, with their parameters and histories as the ops want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from specengine.cache.kv_cache import KVCache
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.drafters.base import Drafter
from specengine.engine.request import Request
from specengine.models.hidden_states import HiddenStates
from specengine.ops.row_tools import likeliest
from specengine.ops.sampling_table import SamplingTable, TokenHistory
from specengine.ops.verify_tree import Accepted, VerifyWorkspace
from specengine.rules import Rule
from specengine.rules.lossless import Match
from specengine.utils.timers import HostClock


class Batch:
    """Rebuilt whenever its members change; nothing in it outlives a change but the requests themselves.

    cycle(batch) runs one round of draft, verify, accept and compact.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        cache: KVCache,
        vocab: int,
        cycle: Callable[[Batch], None],
        device: torch.device,
        rule: Rule,
    ) -> None:
        self.requests, self._cycle, self._device = list(requests), cycle, device
        self.cache = cache.batch([s.pages for s in requests], [len(s.tokens) - 1 for s in requests])
        self.params = SamplingTable.of([s.params for s in requests], [s.seed for s in requests])
        longest = max((s.prompt_length + s.limit for s in self.requests), default=1)
        self.history = TokenHistory.of(
            [s.tokens for s in self.requests], [s.prompt_length for s in self.requests], longest
        )
        # numpy writes a few integers in a fraction of the time that a tensor takes
        self._texts, self._lengths = self.history.tokens.numpy(), self.history.length.numpy()
        self.workspace = VerifyWorkspace.empty(len(self.requests), vocab, weights=not isinstance(rule, Match))
        # Else the most likely token of every node is all there is to know of its logits.
        self.reads_logits = rule.reads_logits or any(s.params.reads_logits for s in requests)
        self.draft_logits: DraftLogits | None = None  # of the trees under way, where the rule wants them

    def step(self) -> dict[str, float]:
        """One cycle; gives the seconds its phases took."""
        self._clock = HostClock()
        with whole_cycle(self.requests):
            self._cycle(self)
        for request in self.requests:
            request.count_time(self._clock.seconds)
        return self._clock.seconds

    def close(self) -> None:
        """Nothing is ever under way between two steps."""

    def mark(self, phase: str) -> None:
        """Notes that a phase has ended."""
        self._clock.mark(phase)

    def draft(self, drafter: Drafter, rule: Rule) -> TreeBatch:
        try:
            self._trees, self.draft_logits = drafter.draft_for(rule.wants, self.requests)
        except ValueError as error:  # weights that are not numbers, say: not to be taken for the target's
            raise ValueError(f"drafter {drafter.name}: {error}") from error
        return TreeBatch.of(self._trees, self._device)

    def commit(self, tree: TreeBatch, accepted: Accepted, scores: torch.Tensor) -> None:
        """Gives every request its accepted tokens and bonus; cuts the paths where a request ended inside its run."""
        self._committed, self._rows, self._scores = [], [], scores
        columns = (accepted.path, accepted.path_length, accepted.bonus, accepted.relaxed, tree.row_start)
        paths, lengths, bonuses, relaxed, first_rows = (column.tolist() for column in columns)
        for b, (request, draft) in enumerate(zip(self.requests, self._trees, strict=True)):
            kept = commit_run(request, draft, paths[b][: lengths[b]], bonuses[b], scores, first_rows[b], relaxed[b])
            end = len(request.tokens)
            self._texts[b, end - len(kept) : end], self._lengths[b] = kept, end
            if len(kept) < lengths[b]:
                accepted.path_length[b] = len(kept)
            self._committed.append(kept)
            self._rows += [first_rows[b] + node for node in paths[b][: len(kept)]]

    def observe(self, drafter: Drafter, hidden_states: HiddenStates) -> None:
        if drafter.reads_choices:
            said = likeliest_tokens(self._scores)
            ends = accumulate(len(tree.tokens) for tree in self._trees)
            choices = [said[end - len(tree.tokens) : end] for end, tree in zip(ends, self._trees, strict=True)]
            drafter.observe_choices(self.requests, self._committed, choices)
        of_path = hidden_states.rows(self._rows) if drafter.reads_hidden_states else None
        drafter.observe(self.requests, self._committed, of_path)


@contextmanager
def whole_cycle(requests: Sequence[Request]) -> Iterator[None]:
    """Nobody may count on what a cycle leaves of its requests when it is cut short."""
    for request in requests:
        request.cached = 0
    yield
    for request in requests:
        request.cached = len(request.tokens) - 1


def likeliest_tokens(scores: torch.Tensor) -> list[int]:
    """Of each row; scores: what TargetOutput has of them."""
    return scores.tolist() if scores.dim() == 1 else [token for (token,) in likeliest(scores, 1)]


def commit_run(
    request: Request,
    tree: DraftTree,
    path: list[int],
    bonus: int,
    scores: torch.Tensor,
    first_row: int,
    relaxed: int,
) -> list[int]:
    """Gives a request the accepted tokens of a path and the bonus token; returns those kept.

    scores: of the target's pass; first_row: row of the request's root.  relaxed: how many of the
    accepted tokens the exact rule would have refused.
    """
    kept = request.commit([tree.tokens[node] for node in path[1:]], bonus)
    request.count_cycle(tree, min(len(kept), len(path) - 1), relaxed)
    if request.params.trace:
        request.record_trace(tree, path, len(kept), bonus)
    if request.params.logprobs:
        rows = torch.tensor(path[: len(kept)]) + first_row
        request.record_logprobs(scores[rows.to(scores.device)].cpu(), kept)
    return kept
