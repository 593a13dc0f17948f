"""Counts what one engine does, for all its schedulers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

from specengine.cache.kv_cache import KVCache
from specengine.engine.counts import Counts
from specengine.engine.prometheus import exposition
from specengine.engine.request import Request
from specengine.types import PHASES


class Metrics:
    """Counts requests, tokens and times of one engine, for all its schedulers.

    labels: model, drafter and rule, for specengine_info.
    """

    def __init__(self, cache: KVCache, labels: Mapping[str, str]) -> None:
        self._cache, self.labels = cache, dict(labels)
        self._counts, self._lock = Counts(), threading.Lock()
        # The garbage collector may close an abandoned stream while this thread holds the lock: ends wait here.
        self._ends: deque[tuple[Request, bool]] = deque()

    def submitted(self, count: int) -> None:
        """Counts requests that enter the queue."""
        with self._lock:
            self._count_ends()
            self._counts.waiting += count

    def refused(self, count: int) -> None:
        """Counts requests that found the queue full."""
        with self._lock:
            self._counts.refused += count

    def admitted(self, request: Request) -> None:
        """Counts a request that leaves the queue for its prefill."""
        with self._lock:
            self._counts.waiting -= 1
            self._counts.running += 1
            self._counts.prompt_tokens += request.prompt_length

    def cycle(self, requests: Sequence[Request], seconds: Mapping[str, float], wall: float) -> None:
        """Counts a cycle.  seconds: of its phases.  wall: of the whole cycle."""
        now = time.perf_counter()
        with self._lock:
            self._count_ends()
            counts = self._counts
            counts.cycles += 1
            counts.expert_reads += max((request.stats.experts_last for request in requests), default=0.0)
            for phase in PHASES[:-1]:
                counts.seconds_by_phase[phase] += (took := seconds.get(phase, 0.0))
                wall -= took
            counts.seconds_by_phase["host"] += wall
            for request in requests:
                self._count_tokens(request, now)

    def ended(self, request: Request, admitted: bool) -> None:
        """Counts the end of a request.  admitted: it had left the queue. Takes no lock: callable at any moment."""
        self._ends.append((request, admitted))

    def snapshot(self) -> Counts:
        """Returns a copy of the counters."""
        with self._lock:
            self._count_ends()
            counts = deepcopy(self._counts)
        counts.pages_used, counts.pages_total = self._cache.pages_in_use, self._cache.pages_with_memory
        counts.prefixes = replace(self._cache.prefixes)
        return counts

    def prometheus(self) -> str:
        """Returns the counters in Prometheus' text format 0.0.4; times are seconds."""
        return exposition([({}, self)])

    def _count_tokens(self, request: Request, now: float) -> None:
        counts, counted = self._counts, request.stats.counted
        tokens = len(request.tokens) - request.prompt_length
        new = tokens - counted.tokens
        if not new:
            return
        if counted.tokens:
            counts.between_tokens.add((now - counted.at) / new, new)
        else:
            counts.first_token.add(now - request.stats.arrived)
        counts.generated_tokens += new
        counts.request_cycles += request.stats.cycles - counted.cycles
        counted.tokens, counted.cycles, counted.at = tokens, request.stats.cycles, now

    def _count_ends(self) -> None:
        while self._ends:
            self._count_end(*self._ends.popleft())

    def _count_end(self, request: Request, admitted: bool) -> None:
        counts, reason = self._counts, request.finish_reason or "cancelled"
        counts.running -= admitted
        counts.waiting -= not admitted
        counts.finished[reason] = counts.finished.get(reason, 0) + 1
        pairs = (counts.drafted_by_depth, request.stats.drafted), (counts.accepted_by_depth, request.stats.accepted)
        for total, own in pairs:
            total += [0] * (len(own) - len(total))
            for depth, count in enumerate(own):
                total[depth] += count
