"""What an engine did so far, counted as it runs: plain values, or Prometheus' text."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from specengine.cache.prefix_cache import PrefixCounts
from specengine.types import PHASES

if TYPE_CHECKING:
    from specengine.cache.kv_cache import KVCache
    from specengine.engine.request import Request

FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BETWEEN_TOKENS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass
class Histogram:
    """bounds: upper ones, inclusive, rising.  counts: one per bound, then what lies beyond.  sum: of all values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass
class Counts:
    """What was counted since the engine was made. A request is a prompt, or one sample of it where n > 1.

    running, waiting: requests in the batch (or whose prompt is being read), and in the queue, now.
    finished: by finish_reason, with `cancelled` and `error` for those that ended without an output.
    refused: requests for which there was no place in the queue.
    cycles: rounds of the batch.  request_cycles: the same, once for each request that took part.
    drafted_by_depth: entry d counts the cycles of ended requests that drafted to depth d + 1 or deeper;
    accepted_by_depth: those of them that accepted a node there.
    seconds_by_phase: of all cycles; host is what Python does in them.
    first_token: seconds from a request to its first token.  between_tokens: seconds between two tokens; each of the k
    tokens of a cycle counts with a k-th of the time since the last cycle.
    pages_used, pages_total: of the key/value cache, now.
    prefixes: what the cache had of prompts already; of all engines that share its pages.
    """

    running: int = 0
    waiting: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cycles: int = 0
    request_cycles: int = 0
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
    def acceptance_by_depth(self) -> list[float]:
        return [a / d for a, d in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True)]


class Metrics:
    """Counts of one engine, whoever calls it; a few additions per cycle.

    about: what the engine is, for the labels of specengine_info.
    """

    def __init__(self, cache: KVCache, about: Mapping[str, str]) -> None:
        self._cache, self._about = cache, dict(about)
        self._counts, self._lock = Counts(), threading.Lock()
        # The garbage collector may close an abandoned stream while this very thread holds the lock.
        self._left: deque[tuple[Request, bool]] = deque()

    def submitted(self, count: int) -> None:
        """Requests entered the queue."""
        with self._lock:
            self._count_ends()
            self._counts.waiting += count

    def refused(self, count: int) -> None:
        """There was no place for requests in the queue."""
        with self._lock:
            self._counts.refused += count

    def joined(self, request: Request) -> None:
        """A request left the queue: its prompt is about to be read."""
        with self._lock:
            self._counts.waiting -= 1
            self._counts.running += 1
            self._counts.prompt_tokens += request.prompt_length

    def cycle(self, requests: Sequence[Request], seconds: Mapping[str, float], wall: float) -> None:
        """A cycle of these requests ended.  seconds: of its phases.  wall: of all of it."""
        now = time.perf_counter()
        with self._lock:
            self._count_ends()
            counts = self._counts
            counts.cycles += 1
            for phase in PHASES[:-1]:
                counts.seconds_by_phase[phase] += (took := seconds.get(phase, 0.0))
                wall -= took
            counts.seconds_by_phase["host"] += wall
            for request in requests:
                self._progress(request, now)

    def left(self, request: Request, began: bool) -> None:
        """A request is gone.  began: it had left the queue. Takes no lock, so it may be called at any moment."""
        self._left.append((request, began))

    def snapshot(self) -> Counts:
        """The counts of this moment, as a copy."""
        with self._lock:
            self._count_ends()
            counts = deepcopy(self._counts)
        counts.pages_used, counts.pages_total = self._cache.pages_in_use, self._cache.k.shape[1]
        counts.prefixes = replace(self._cache.prefixes)
        return counts

    def prometheus(self) -> str:
        """The counts in Prometheus' text format, version 0.0.4; times in seconds."""
        return exposition([({}, self)])

    def families(self) -> Iterable[Family]:
        """The counts of this moment, as exposition() writes them."""
        return _families(self.snapshot(), self._about)

    def _progress(self, request: Request, now: float) -> None:
        counts, meter = self._counts, request.meter
        tokens, cycles = len(request.tokens) - request.prompt_length, request.cycles
        new = tokens - meter.tokens
        if new:
            if meter.tokens:
                counts.between_tokens.add((now - meter.at) / new, new)
            else:
                counts.first_token.add(now - request.arrived)
            counts.generated_tokens += new
            counts.request_cycles += cycles - meter.cycles
            meter.tokens, meter.cycles, meter.at = tokens, cycles, now

    def _count_ends(self) -> None:
        while self._left:
            self._count_end(*self._left.popleft())

    def _count_end(self, request: Request, began: bool) -> None:
        counts, reason = self._counts, request.finish_reason or "cancelled"
        counts.running -= began
        counts.waiting -= not began
        counts.finished[reason] = counts.finished.get(reason, 0) + 1
        depths = (counts.drafted_by_depth, request.drafted), (counts.accepted_by_depth, request.accepted)
        for total, own in depths:
            total += [0] * (len(own) - len(total))
            for depth, count in enumerate(own):
                total[depth] += count


@dataclass
class Meter:
    """What was counted of a request.  at: when."""

    tokens: int = 0
    cycles: int = 0
    at: float = 0.0


Labels = Mapping[str, object]
Sample = tuple[str, Labels, float]  # what is appended to the name, labels, value
Family = tuple[str, str, str, list[Sample]]  # name, type, help


def exposition(engines: Iterable[tuple[Labels, Metrics]], others: Iterable[Family] = ()) -> str:
    """Prometheus' text of several engines, told apart by labels, and of other families."""
    merged: dict[str, Family] = {}
    for labels, metrics in engines:
        for name, kind, help_text, samples in metrics.families():
            merged.setdefault(name, (name, kind, help_text, []))[3].extend(
                (suffix, {**own, **labels}, value) for suffix, own, value in samples
            )
    return "".join(_written(*family) for family in (*merged.values(), *others))


def _families(counts: Counts, about: Labels) -> Iterable[Family]:

    def one(value: float) -> list[Sample]:
        return [("", {}, value)]

    def by(label: str, values: Iterable[tuple[object, float]]) -> list[Sample]:
        return [("", {label: key}, value) for key, value in values]

    yield "info", "gauge", "What the engine is.", [("", about, 1)]
    yield "requests_running", "gauge", "Requests in the batch.", one(counts.running)
    yield "requests_waiting", "gauge", "Requests in the queue.", one(counts.waiting)
    yield (
        "requests_finished_total",
        "counter",
        "Requests that ended, by reason.",
        by("reason", sorted(counts.finished.items())),
    )
    yield "requests_refused_total", "counter", "Requests that found the queue full.", one(counts.refused)
    yield "prompt_tokens_total", "counter", "Tokens of prompts.", one(counts.prompt_tokens)
    yield "generated_tokens_total", "counter", "Tokens committed.", one(counts.generated_tokens)
    yield "cycles_total", "counter", "Cycles of the batch.", one(counts.cycles)
    yield "request_cycles_total", "counter", "Cycles, once per request in them.", one(counts.request_cycles)
    yield "tau", "gauge", "Mean tokens committed per request and cycle.", one(counts.tau)
    deep = "Cycles of ended requests that {} depth, or deeper."
    for verb, column in (("drafted", counts.drafted_by_depth), ("accepted", counts.accepted_by_depth)):
        samples = by("depth", enumerate(column, start=1))
        yield f"{verb}_depth_total", "counter", deep.format(f"{verb} a node of this"), samples
    yield (
        "phase_seconds_total",
        "counter",
        "Time of cycles, by phase.",
        by("phase", counts.seconds_by_phase.items()),
    )
    yield "first_token_seconds", "histogram", "From request to first token.", _buckets(counts.first_token)
    yield "between_tokens_seconds", "histogram", "Between two tokens.", _buckets(counts.between_tokens)
    yield "cache_pages_used", "gauge", "Pages of the key/value cache in use.", one(counts.pages_used)
    yield "cache_pages", "gauge", "Pages of the key/value cache.", one(counts.pages_total)
    prefixes = counts.prefixes
    yield "prefix_tokens_total", "counter", "Tokens of prompts that were looked up.", one(prefixes.looked_up)
    yield "prefix_hit_tokens_total", "counter", "Tokens of prompts that were cached.", one(prefixes.hit)
    yield "prefix_evicted_pages_total", "counter", "Pages of earlier texts that made room.", one(prefixes.evicted)
    yield "prefix_pages", "gauge", "Pages whose text can be found, in use or not.", one(prefixes.cached)


def _buckets(histogram: Histogram) -> list[Sample]:
    below = list(accumulate(histogram.counts))
    bounds = (*histogram.bounds, "+Inf")
    samples = [("_bucket", {"le": bound}, count) for bound, count in zip(bounds, below, strict=True)]
    return [*samples, ("_sum", {}, histogram.sum), ("_count", {}, below[-1])]


def _written(name: str, kind: str, help_text: str, samples: list[Sample]) -> str:
    name = f"specengine_{name}"
    lines = [f"# HELP {name} {_escaped(help_text)}", f"# TYPE {name} {kind}"]
    for suffix, labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(str(of), quote=True)}"' for key, of in labels.items())
        lines.append(f"{name}{suffix}{'{' + inside + '}' if inside else ''} {value}")
    return "\n".join(lines) + "\n"


def _escaped(text: str, quote: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quote else text
