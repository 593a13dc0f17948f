"""How long the phases of a cycle take."""

from __future__ import annotations

import time

import torch


class HostClock:
    """For phases that the host runs itself or waits for. seconds: by phase, added up where one is marked twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Notes that a phase has ended, and begins the next one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class DeviceClock:
    """The same inside a CUDA graph, made and marked while it is captured; every replay measures anew."""

    def __init__(self) -> None:
        self._begin = self._event()
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        self._marks.append((phase, self._event()))

    @property
    def seconds(self) -> dict[str, float]:
        """Of the last replay, which must have ended."""
        seconds: dict[str, float] = {}
        last = self._begin
        for phase, event in self._marks:
            seconds[phase] = seconds.get(phase, 0.0) + last.elapsed_time(event) / 1e3
            last = event
        return seconds

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=True)  # a node of the graph instead of a mere dependency
        event.record()
        return event
