"""The sequences that share a cycle, with their parameters and histories as the ops want them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from itertools import accumulate

import torch

from specengine.cache.kv_cache import KVCache
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.drafters.base import Drafter
from specengine.engine.request import Sequence
from specengine.models.hidden_states import Features
from specengine.ops.row_tools import likeliest
from specengine.ops.verify_tree import Accepted, SamplingTable, TokenHistory, VerifyWorkspace
from specengine.rules import Rule
from specengine.rules.lossless import Match
from specengine.utils.timers import HostClock


class Batch:
    """Rebuilt whenever its members change; nothing in it outlives a change but the sequences themselves.

    cycle(batch) runs one round of draft, verify, accept and compact.
    """

    def __init__(
        self,
        sequences: Seq[Sequence],
        cache: KVCache,
        vocab: int,
        cycle: Callable[[Batch], None],
        device: torch.device,
        rule: Rule,
    ) -> None:
        self.sequences, self._cycle, self._device = list(sequences), cycle, device
        self.cache = cache.batch([s.pages for s in sequences], [len(s.tokens) - 1 for s in sequences])
        self.params = SamplingTable.of([s.params for s in sequences], [s.seed for s in sequences])
        longest = max((s.prompt_length + s.limit for s in self.sequences), default=1)
        self.history = TokenHistory.of(
            [s.tokens for s in self.sequences], [s.prompt_length for s in self.sequences], longest
        )
        # numpy writes a few integers in a fraction of the time that a tensor takes
        self._texts, self._lengths = self.history.tokens.numpy(), self.history.length.numpy()
        self.workspace = VerifyWorkspace(len(self.sequences), vocab, weights=not isinstance(rule, Match))
        # Else the most likely token of every node is all there is to know of its logits.
        self.reads_logits = rule.reads_logits or any(s.params.reads_logits for s in sequences)
        self.draft_logits: DraftLogits | None = None  # of the trees under way, where the rule wants them

    def step(self) -> dict[str, float]:
        """One cycle; gives the seconds its phases took."""
        self._clock = HostClock()
        with whole_cycle(self.sequences):
            self._cycle(self)
        for sequence in self.sequences:
            sequence.count_time(self._clock.seconds)
        return self._clock.seconds

    def close(self) -> None:
        """Nothing is ever under way between two steps."""

    def mark(self, phase: str) -> None:
        """Notes that a phase has ended."""
        self._clock.mark(phase)

    def draft(self, drafter: Drafter, rule: Rule) -> TreeBatch:
        try:
            self._trees, self.draft_logits = drafter.draft_for(rule.wants, self.sequences)
        except ValueError as error:  # weights that are not numbers, say: not to be taken for the target's
            raise ValueError(f"drafter {drafter.name}: {error}") from error
        return TreeBatch.of(self._trees, self._device)

    def commit(self, tree: TreeBatch, accepted: Accepted, scores: torch.Tensor) -> None:
        """Gives every sequence its accepted tokens and bonus; cuts the paths where a sequence ended inside its run."""
        self._committed, self._rows, self._scores = [], [], scores
        columns = (accepted.path, accepted.path_length, accepted.bonus, accepted.relaxed, tree.row_start)
        paths, lengths, bonuses, relaxed, first_rows = (column.tolist() for column in columns)
        for b, (sequence, draft) in enumerate(zip(self.sequences, self._trees, strict=True)):
            kept = commit_run(sequence, draft, paths[b][: lengths[b]], bonuses[b], scores, first_rows[b], relaxed[b])
            end = len(sequence.tokens)
            self._texts[b, end - len(kept) : end], self._lengths[b] = kept, end
            if len(kept) < lengths[b]:
                accepted.path_length[b] = len(kept)
            self._committed.append(kept)
            self._rows += [first_rows[b] + node for node in paths[b][: len(kept)]]

    def observe(self, drafter: Drafter, features: Features) -> None:
        if drafter.reads_choices:
            said = likeliest_tokens(self._scores)
            ends = accumulate(len(tree.tokens) for tree in self._trees)
            choices = [said[end - len(tree.tokens) : end] for end, tree in zip(ends, self._trees, strict=True)]
            drafter.observe_choices(self.sequences, self._committed, choices)
        of_path = features.rows(self._rows) if drafter.reads_features else None
        drafter.observe(self.sequences, self._committed, of_path)


@contextmanager
def whole_cycle(sequences: Seq[Sequence]) -> Iterator[None]:
    """Nobody may count on what a cycle leaves of its sequences when it is cut short."""
    for sequence in sequences:
        sequence.cached = 0
    yield
    for sequence in sequences:
        sequence.cached = len(sequence.tokens) - 1


def likeliest_tokens(scores: torch.Tensor) -> list[int]:
    """Of each row; scores: what TargetOutput has of them."""
    return scores.tolist() if scores.dim() == 1 else [token for (token,) in likeliest(scores, 1)]


def commit_run(
    sequence: Sequence,
    tree: DraftTree,
    path: list[int],
    bonus: int,
    scores: torch.Tensor,
    first_row: int,
    relaxed: int,
) -> list[int]:
    """Gives a sequence the accepted tokens of a path and the bonus token; returns those kept.

    scores: of the target's pass; first_row: row of the sequence's root.  relaxed: how many of the
    accepted tokens the exact rule would have refused.
    """
    kept = sequence.commit([tree.tokens[node] for node in path[1:]], bonus)
    sequence.count_cycle(tree, min(len(kept), len(path) - 1), relaxed)
    if sequence.params.trace:
        sequence.record_trace(tree, path, len(kept), bonus)
    if sequence.params.logprobs:
        rows = torch.tensor(path[: len(kept)]) + first_row
        sequence.record_logprobs(scores[rows.to(scores.device)].cpu(), kept)
    return kept
