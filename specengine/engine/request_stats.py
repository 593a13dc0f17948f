"""The statistics of one request, counted cycle by cycle."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from specengine.draft_trees.tree import DraftTree
from specengine.rules import Rule
from specengine.types import PHASES, GenerationStats, SourceStats


@dataclass
class Progress:
    """What the metrics have counted of a request so far.  at: the time of the last count, in seconds."""

    tokens: int = 0
    cycles: int = 0
    at: float = 0.0


@dataclass
class RequestStats:
    """Counts the cycles of one request. Times are seconds of time.perf_counter().

    prefix_hit: prompt tokens that the cache had already.  relaxed: accepted tokens that the exact rule refuses.
    experts, experts_last: that a layer read, in the mean, in all passes and in the last one; 0 without counts.
    drafted, accepted: entry d counts the cycles that drafted, or accepted, a node of depth d + 1.
    """

    prefix_hit: int = 0
    cycles: int = 0
    relaxed: int = 0
    experts: float = 0.0
    experts_last: float = 0.0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    deliveries: list[tuple[float, int]] = field(default_factory=list)
    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    finished: float = 0.0
    prefill_seconds: float = 0.0
    counted: Progress = field(default_factory=Progress)

    def start_decoding(self, prefill_began: float) -> None:
        """Notes that the prompt is cached."""
        self.started = time.perf_counter()
        self.prefill_seconds = self.started - prefill_began

    def finish(self) -> None:
        """Notes the end of the request, which may come before its prompt is cached."""
        self.finished = time.perf_counter()
        self.started = self.started or self.finished

    def deliver(self, tokens: int) -> None:
        """Notes that a cycle committed so many tokens."""
        self.deliveries.append((time.perf_counter() - self.arrived, tokens))

    def count_cycle(self, tree: DraftTree, accepted: int, relaxed: int) -> None:
        """Counts a cycle that accepted `accepted` drafted tokens, `relaxed` of them against the exact rule."""
        self.cycles += 1
        self.relaxed += min(relaxed, accepted)  # a relaxed token may lie behind the end of the request
        if len(tree.parents) == 1:
            return
        depths = [0] * len(tree.parents)
        for node, parent in enumerate(tree.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        for depth in range(max(depths)):
            if depth == len(self.drafted):
                self.drafted.append(0)
                self.accepted.append(0)
            self.drafted[depth] += 1
            self.accepted[depth] += depth < accepted

    def count_experts(self, experts: float) -> None:
        """Counts how many experts a layer read in the pass of a cycle, in the mean."""
        self.experts_last = experts
        self.experts += experts

    def count_time(self, seconds: Mapping[str, float], *, finished: bool) -> None:
        """Adds the seconds of each phase of a cycle, at its end."""
        if finished:
            self.finished = time.perf_counter()  # the phases behind the commit belong to the last cycle too
        for phase in PHASES:
            self.seconds[phase] += seconds.get(phase, 0.0)

    def summary(self, rule: Rule, tokens: int, sources: dict[str, SourceStats]) -> GenerationStats:
        """Returns the statistics as the caller gets them.  tokens: of the output."""
        decode = self.finished - self.started
        self.seconds["host"] = max(0.0, decode - sum(self.seconds[phase] for phase in PHASES[:-1]))
        return GenerationStats(
            rule=rule.name,
            lossless=rule.lossless,
            relaxed=self.relaxed,
            cycles=self.cycles,
            tau=tokens / max(1, self.cycles),
            experts_per_layer=self.experts / self.cycles if self.experts else None,
            acceptance_by_depth=[a / d for a, d in zip(self.accepted, self.drafted, strict=True)],
            sources=sources,
            deliveries=self.deliveries,
            prefix_hit_tokens=self.prefix_hit,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=decode,
            tokens_per_second=tokens / max(self.prefill_seconds + decode, 1e-9),
            seconds_by_phase=self.seconds,
        )
