"""One request on its way: its tokens, what ends it, its text, its statistics."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from specengine.cache.prefix_cache import Sharing
from specengine.draft_trees.tree import DraftTree
from specengine.engine.metrics import Meter
from specengine.rules import Rule
from specengine.tokenizer import Detokenizer, StopStrings, Tokenizer
from specengine.types import (
    PHASES,
    CycleTrace,
    GenerationOutput,
    GenerationStats,
    SamplingParams,
    SourceStats,
    StreamEvent,
    TokenLogprob,
)


@dataclass
class Request:
    """A prompt and its continuation. tokens: prompt and output; the last one is the root, not yet in the cache."""

    tokens: list[int]
    params: SamplingParams
    seed: int
    limit: int  # output tokens allowed: max_new_tokens, or what the context leaves
    eos_token_ids: Collection[int]
    tokenizer: Tokenizer | None
    pages: list[int] = field(default_factory=list)
    sharing: Sharing | None = None  # with whom it shares pages
    skips_drafter_cache: bool = False  # its drafter keeps nothing of it beside the target's cache
    drafter_state: Any = None
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)
        self.prefix_hit = 0  # tokens that were cached by others
        self.cached = 0  # tokens in the cache as they stay; 0 during a cycle
        self.logprobs: list[TokenLogprob] = []
        self.trace: list[CycleTrace] = []
        self.prefill_seconds = 0.0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.arrived = time.perf_counter()
        self.started = self.finished = 0.0
        self.meter = Meter()
        self.deliveries: list[tuple[float, int]] = []  # as GenerationStats has them
        self.accepted_last = 0  # drafted tokens the last cycle kept
        self.sources: dict[str, SourceStats] = {}  # as GenerationStats has them
        self.cycles = self._relaxed = 0
        self.drafted: list[int] = []  # cycles that drafted to depth d + 1
        self.accepted: list[int] = []  # cycles that accepted a node there
        self._text: list[str] = []
        self._unread: list[int] = []  # tokens whose text nobody has asked for
        self.index = 0  # among the texts of its request
        self._told, self._told_text, self._told_cycles = self.prompt_length, "", 0  # what earlier events said
        self._told_end = False
        self._detokenizer: Detokenizer | None = self.tokenizer.detokenizer() if self.tokenizer else None
        if self._detokenizer:
            # The text continues the prompt: a leading space or the rest of a character depends on how that ends.
            self._detokenizer.feed(self.tokens[-4:])
        self._stops = StopStrings(self.params.stop) if self.params.stop else None

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def draft_limit(self) -> int:
        """Deepest node worth drafting: with the bonus token, a path of this depth reaches the limit."""
        return self.prompt_length + self.limit - len(self.tokens) - 1

    def shared_text(self, filled: int) -> list[int]:
        """What others may find of it where its first `filled` slots are as they stay; with the token behind them."""
        if self.sharing is None:
            return []
        most = self.cached if self.sharing.answers else min(self.cached, self.prompt_length - 1)
        return self.tokens[: min(filled, most) + 1]

    def commit(self, accepted: list[int], bonus: int) -> list[int]:
        """Appends the accepted tokens and the bonus up to the one that ends the request; returns those kept."""
        kept = []
        for token in (*accepted, bonus):
            kept.append(token)
            self.tokens.append(token)
            if reason := self._ended_by(token):
                self.end(reason)
                break
        self.deliveries.append((time.perf_counter() - self.arrived, len(kept)))
        return kept

    def end(self, reason: str) -> None:
        """Ends it where it is."""
        self.finish_reason, self.finished = reason, time.perf_counter()
        self.started = self.started or self.finished  # its prompt may not have been read
        self._finish_text()

    def _ended_by(self, token: int) -> str | None:
        ended = token in self.eos_token_ids and not self.params.ignore_eos
        if self._stops and self._detokenizer:
            piece, stopped = self._stops.feed(self._detokenizer.feed([token]))
            ended = ended or stopped
            self._text.append(piece)
        else:
            self._unread.append(token)
        if ended:
            return "stop"
        return "length" if len(self.tokens) - self.prompt_length >= self.limit else None

    def _finish_text(self) -> None:
        """Releases the text held back: an incomplete character, a possible beginning of a stop string."""
        self._read()
        rest = self._detokenizer.finish() if self._detokenizer else ""
        if self._stops and self._stops.matched is None:
            rest, stopped = self._stops.feed(rest)
            rest += "" if stopped else self._stops.finish()
        elif self._stops:
            rest = ""
        self._text.append(rest)

    def _read(self) -> None:
        """At once: a cycle is no good time, its caches are full of weights."""
        unread, self._unread = self._unread, []
        if self._detokenizer and unread:
            self._text.append(self._detokenizer.feed(unread))

    def take_text(self) -> str:
        """Text completed since the last call; the output's text is all of it together."""
        self._read()
        text = "".join(self._text)
        self._text = []
        return text

    @property
    def has_news(self) -> bool:
        """Whether the next event has tokens, or is the last one."""
        return len(self.tokens) > self._told or bool(self.finish_reason and not self._told_end)

    def take_event(self, rule: Rule) -> StreamEvent:
        """What was added since the last call; the last event carries the output."""
        piece, new = self.take_text(), self.tokens[self._told :]
        logprobs, trace = self.logprobs[self._told - self.prompt_length :], self.trace[self._told_cycles :]
        self._told, self._told_text = len(self.tokens), self._told_text + piece
        self._told_cycles, self._told_end = len(self.trace), bool(self.finish_reason)
        output = self.output(self._told_text, rule) if self.finish_reason else None
        return StreamEvent(
            piece,
            new,
            self.accepted_last,
            output,
            self.index,
            logprobs if self.params.logprobs else None,
            trace if self.params.trace else None,
        )

    def count_cycle(self, tree: DraftTree, accepted: int, relaxed: int) -> None:
        """Statistics of one cycle that accepted `accepted` drafted tokens, `relaxed` of them against the exact rule."""
        self.cycles += 1
        self._relaxed += min(relaxed, accepted)  # where the run was cut, some of them may be past its end
        self.accepted_last = accepted
        depths = [0] * len(tree.parents)
        for node, parent in enumerate(tree.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        for depth in range(max(depths)):
            if depth == len(self.drafted):
                self.drafted.append(0)
                self.accepted.append(0)
            self.drafted[depth] += 1
            self.accepted[depth] += depth < accepted

    def count_time(self, seconds: Mapping[str, float]) -> None:
        """Adds what the phases of one cycle took, at its end."""
        if self.finish_reason:
            self.finished = time.perf_counter()  # what follows the commit belongs to the last cycle too
        for phase in PHASES:
            self.seconds[phase] += seconds.get(phase, 0.0)

    def record_trace(self, tree: DraftTree, path: list[int], kept: int, bonus: int) -> None:
        """One cycle's tree and what became of it; path holds the accepted nodes, root first."""
        accepted = tuple(path[1 : kept + 1])
        last = bonus if kept == len(path) else None
        self.trace.append(CycleTrace(tuple(tree.tokens), tuple(tree.parents), accepted, last))

    def record_logprobs(self, rows: torch.Tensor, kept: list[int]) -> None:
        """rows: float32 [len(kept), V], the target's logits each kept token was drawn from."""
        for row, token in zip(rows, kept, strict=True):
            log_probs = row.double().log_softmax(dim=-1)
            values, ids = log_probs.topk(min(self.params.logprobs, len(row)))
            top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda entry: (-entry[1], entry[0]))
            self.logprobs.append(TokenLogprob(token, log_probs[token].item(), tuple(top)))

    def output(self, text: str, rule: Rule) -> GenerationOutput:
        """The finished request as the caller gets it."""
        decode, count = self.finished - self.started, len(self.tokens) - self.prompt_length
        self.seconds["host"] = max(0.0, decode - sum(self.seconds[phase] for phase in PHASES[:-1]))
        stats = GenerationStats(
            rule=rule.name,
            lossless=rule.lossless,
            relaxed=self._relaxed,
            cycles=self.cycles,
            tau=count / max(1, self.cycles),
            acceptance_by_depth=[a / d for a, d in zip(self.accepted, self.drafted, strict=True)],
            sources=self.sources,
            deliveries=self.deliveries,
            prefix_hit_tokens=self.prefix_hit,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=decode,
            tokens_per_second=count / max(self.prefill_seconds + decode, 1e-9),
            seconds_by_phase=self.seconds,
        )
        return GenerationOutput(
            text=text,
            token_ids=self.output_ids,
            prompt_token_ids=self.tokens[: self.prompt_length],
            finish_reason=self.finish_reason or "length",
            logprobs=self.logprobs if self.params.logprobs else None,
            stats=stats,
            trace=self.trace if self.params.trace else None,
        )
