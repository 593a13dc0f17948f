"""One request: its tokens, its place in the cache, and the events that its caller reads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.cache.prefix_cache import Sharing
from specengine.constraints import Constraint
from specengine.draft_trees.tree import DraftTree
from specengine.engine.output_text import OutputText
from specengine.engine.request_stats import RequestStats
from specengine.models.lora.adapters import Adapter
from specengine.rules import Rule
from specengine.tokenizer import Tokenizer
from specengine.types import (
    CycleTrace,
    GenerationFailed,
    GenerationOutput,
    SamplingParams,
    SourceStats,
    StreamEvent,
    TokenLogprob,
)


class NoToken(GenerationFailed, ValueError):
    """The scores of one request are not numbers, or its mask leaves none of them; other requests go on."""


@dataclass
class Reported:
    """What the events of a stream have delivered so far."""

    tokens: int
    cycles: int = 0
    text: str = ""
    finished: bool = False


@dataclass
class Request:
    """One sample of one prompt. tokens: prompt and output; the last one is the root and has no slot in the cache yet.

    limit: output tokens, at most: max_new_tokens, or as many as the context has room for.
    adapter: of the target for its rows; None: none.
    sharing: whose pages it may share.  drafter_reads: the drafter reads it, and keeps keys and values of it.
    drafter_states: what drafters remember of it, by drafter.  constraint: what its text must be, if anything.
    failure: why it ended with finish_reason `error`, where the cause is its own.
    accepted_last: drafted tokens that the last cycle accepted.
    index: its number among the requests of a call.  cached: tokens whose slots are final; 0 during a cycle.
    """

    tokens: list[int]
    params: SamplingParams
    seed: int
    limit: int
    eos_token_ids: Collection[int]
    tokenizer: Tokenizer | None
    adapter: Adapter | None = None
    pages: list[int] = field(default_factory=list)
    sharing: Sharing | None = None
    drafter_reads: bool = True
    drafter_states: dict[Any, Any] = field(default_factory=dict)
    constraint: Constraint | None = None
    finish_reason: str | None = None
    failure: GenerationFailed | None = None
    index: int = 0
    cached: int = 0
    accepted_last: int = 0
    sources: dict[str, SourceStats] = field(default_factory=dict)
    trace: list[CycleTrace] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: RequestStats = field(default_factory=RequestStats)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self.text = OutputText(
            self.tokenizer,
            self.tokens,
            self.params.stop,
            self.params.skip_special_tokens,
            self.eos_token_ids,
        )
        self._reported = Reported(self.prompt_length)

    @property
    def adapter_index(self) -> int:
        """The number of its adapter in a pass; -1: none."""
        return -1 if self.adapter is None else self.adapter.index

    @property
    def output_ids(self) -> list[int]:
        """The output tokens so far."""
        return self.tokens[self.prompt_length :]

    @property
    def draft_limit(self) -> int:
        """The deepest useful depth of a node: such a path and the bonus token reach the request's limit."""
        return self.prompt_length + self.limit - len(self.tokens) - 1

    def shareable_tokens(self, drafter_slots: int) -> list[int]:
        """Returns the tokens whose pages other requests may use, and the token behind them.

        drafter_slots: first slots whose drafter cache is final too.
        """
        if self.sharing is None:
            return []
        final = self.cached if self.sharing.answers else min(self.cached, self.prompt_length - 1)
        return self.tokens[: min(drafter_slots, final) + 1]

    def commit(self, accepted: list[int], bonus: int) -> list[int]:
        """Appends accepted tokens and bonus token as far as the request goes; returns the appended ones."""
        kept = []
        for token in (*accepted, bonus):
            kept.append(token)
            self.tokens.append(token)
            if reason := self._end_reason(token):
                self.finish(reason)
                break
        self.stats.deliver(len(kept))
        return kept

    def finish(self, reason: str) -> None:
        """Ends the request where it is."""
        self.finish_reason = reason
        self.stats.finish()
        self.text.finish()

    def fail(self, failure: GenerationFailed) -> None:
        """Ends the request alone; others of its batch go on."""
        self.failure = failure
        self.finish("error")

    def _end_reason(self, token: int) -> str | None:
        params, length = self.params, len(self.tokens) - self.prompt_length
        if token in params.stop_token_ids:
            return "stop"
        stopped = self.text.append(token, may_end=length > params.min_tokens)
        if stopped or (token in self.eos_token_ids and not (params.ignore_eos and params.constraint is None)):
            return "stop"
        return "length" if length >= self.limit else None

    @property
    def has_event(self) -> bool:
        """Whether there are tokens, or an end, that no event has delivered."""
        return len(self.tokens) > self._reported.tokens or bool(self.finish_reason and not self._reported.finished)

    def take_event(self, rule: Rule) -> StreamEvent:
        """Returns what was added since the last event; the last event carries the output."""
        reported, piece = self._reported, self.text.take()
        new = self.tokens[reported.tokens :]
        logprobs = self.logprobs[reported.tokens - self.prompt_length :] if self.params.logprobs else None
        trace = self.trace[reported.cycles :] if self.params.trace else None
        text, finished = reported.text + piece, bool(self.finish_reason)
        self._reported = Reported(len(self.tokens), len(self.trace), text, finished)
        output = self.output(text, rule) if finished else None
        return StreamEvent(piece, new, self.accepted_last, output, self.index, logprobs, trace)

    def count_cycle(self, tree: DraftTree, accepted: int, relaxed: int) -> None:
        """Counts a cycle that accepted `accepted` drafted tokens, `relaxed` of them against the exact rule."""
        self.accepted_last = accepted
        self.stats.count_cycle(tree, accepted, relaxed)

    def record_trace(self, tree: DraftTree, path: Sequence[int], kept: int, bonus: int) -> None:
        """Records a cycle's tree and its accepted nodes.  path: the accepted nodes, root first."""
        accepted = tuple(path[1 : kept + 1])
        last = bonus if kept == len(path) else None
        self.trace.append(CycleTrace(tuple(tree.tokens), tuple(tree.parents), accepted, last))

    def record_logprobs(self, rows: torch.Tensor, kept: Sequence[int]) -> None:
        """Records log-probabilities.  rows: float32 [len(kept), V], the target's logits of each kept token."""
        for row, token in zip(rows, kept, strict=True):
            log_probs = row.double().log_softmax(dim=-1)
            values, ids = log_probs.topk(min(self.params.logprobs, len(row)))
            top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda entry: (-entry[1], entry[0]))
            self.logprobs.append(TokenLogprob(token, log_probs[token].item(), tuple(top)))

    def output(self, text: str, rule: Rule) -> GenerationOutput:
        """Returns the finished request as its caller gets it."""
        return GenerationOutput(
            text=text,
            token_ids=self.output_ids,
            prompt_token_ids=self.tokens[: self.prompt_length],
            finish_reason=self.finish_reason or "length",
            logprobs=self.logprobs if self.params.logprobs else None,
            stats=self.stats.summary(rule, len(self.output_ids), self.sources),
            trace=self.trace if self.params.trace else None,
        )
