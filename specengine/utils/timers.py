"""Clocks for the phases of a cycle."""

from __future__ import annotations

import time

import torch


class HostClock:
    """Times phases on the host. seconds: by phase; a phase that is marked twice counts both times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Ends a phase and begins the next one."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class DeviceClock:
    """Times phases inside a CUDA graph. It is created and marked during the capture; every replay measures again."""

    def __init__(self) -> None:
        self._begin = self._event()
        self._marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """Ends a phase and begins the next one."""
        self._marks.append((phase, self._event()))

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase of the last replay, which must have ended."""
        seconds: dict[str, float] = {}
        last = self._begin
        for phase, event in self._marks:
            seconds[phase] = seconds.get(phase, 0.0) + last.elapsed_time(event) / 1e3
            last = event
        return seconds

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=True)  # external: a node of the graph
        event.record()
        return event
