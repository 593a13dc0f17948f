"""torch.cuda.Event over the stand-in."""

from __future__ import annotations

import time

from tests.cuda_standin.device import Device
from tests.cuda_standin.streams import Known, Stream, merge


class Event:
    """Marks a place in a stream. An external one is a node of the graph that is captured, and marks every replay."""

    device: Device  # set where torch.cuda is replaced

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False) -> None:
        self.timed, self.external = enable_timing, external
        self._known: Known | None = None
        self._time = 0.0
        self._captured = False

    def record(self, stream: Stream | None = None) -> None:
        device = self.device
        stream = stream or device.stream
        device.check_stream(stream)
        graph = device.captures()
        if graph and stream is graph.stream:
            self._captured = not self.external
            if self.external:
                graph.record_event(self)
            return
        self.mark(stream)

    def mark(self, stream: Stream) -> None:
        """Notes how far the stream is."""
        self._known, self._time, self._captured = dict(stream.known), time.perf_counter(), False

    def wait(self, stream: Stream | None = None) -> None:
        device = self.device
        stream = stream or device.stream
        device.check_stream(stream)
        if self._captured or device.captures():
            raise device.refusals.refuse("Event.wait: streams that fork and join during a capture are not modelled")
        merge(stream.known, self._known or {})

    def synchronize(self) -> None:
        if self._captured:
            raise self.device.refusals.refuse("Event.synchronize: the event was recorded in a capture")
        self.device.wait("Event.synchronize", self._known or {})

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds. Refused before the host knows that both were reached."""
        for event in (self, end):
            if not event.timed or event._captured or event._known is None:
                raise self.device.refusals.refuse("Event.elapsed_time: an event has no time")
            if any(self.device.host.get(stream, 0) < work for stream, work in event._known.items()):
                raise self.device.refusals.refuse("Event.elapsed_time: the host has not waited for an event")
        return 1e3 * (end._time - self._time)
