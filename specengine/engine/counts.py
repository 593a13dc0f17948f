"""The counters of an engine."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from specengine.cache.prefix_cache import PrefixCounts
from specengine.types import PHASES

# Upper bounds of the histograms, in seconds.
FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass
class Histogram:
    """Counts values by size.  bounds: upper ones, inclusive, rising.  counts: one per bound, and one for larger values.
    sum: of all values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value, or several equal ones."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass
class Counts:
    """The counters since the engine was made. A request is a prompt, or one sample of it where n > 1.

    running, waiting: requests that prefill or decode, and requests in the queue, now.
    finished: requests by finish_reason; `cancelled` and `error` are those without an output.
    refused: requests that found the queue full.
    cycles: cycles of the batch.  request_cycles: the same, once for each request in them.
    expert_reads: experts that a layer read, in the mean, summed over the cycles; 0 for a dense model.
    drafted_by_depth: entry d counts the cycles of ended requests that drafted to depth d + 1 or deeper.
    accepted_by_depth: those of them that accepted a node there.
    seconds_by_phase: of all cycles; `host` is Python's share.
    first_token: seconds from a request to its first token.  between_tokens: seconds between two tokens; the k tokens of
      one cycle share the time since the last cycle equally.
    pages_used, pages_total: of the key/value cache, now.
    prefixes: prefix hits of all engines that share the cache.
    """

    running: int = 0
    waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cycles: int = 0
    request_cycles: int = 0
    expert_reads: float = 0.0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    seconds_by_phase: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(BETWEEN_TOKENS))
    pages_used: int = 0
    pages_total: int = 0
    prefixes: PrefixCounts = field(default_factory=PrefixCounts)

    @property
    def tau(self) -> float:
        """Mean committed tokens per request and cycle."""
        return self.generated_tokens / max(1, self.request_cycles)

    @property
    def experts_per_layer(self) -> float | None:
        """Mean of the experts that a layer reads in the pass of a cycle; None for a dense model."""
        return self.expert_reads / self.cycles if self.expert_reads else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of the cycles drafting to each depth that accepted a node there."""
        return [a / d for a, d in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True)]
