"""Streams, and which work is known to be done before which.

Every stream counts its work. A stream knows how far it, and every stream that it has waited for, had come. The host
knows what it has synchronised with, and so does all work that it launches later.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cuda_standin.device import Device
    from tests.cuda_standin.events import Event

Known = dict[int, int]  # stream id -> work that is done
_ids = count()


def merge(known: Known, other: Mapping[int, int]) -> None:
    """Adds what `other` knows."""
    for stream, work in other.items():
        known[stream] = max(known.get(stream, 0), work)


class Stream:
    """torch.cuda.Stream over the stand-in: a queue of work."""

    def __init__(self, device: Device) -> None:
        self.id = next(_ids)
        self.known: Known = {self.id: 0}
        self._device = device

    def launch(self) -> tuple[int, int]:
        """Counts one more piece of work, which the host launches now; returns its place."""
        merge(self.known, self._device.host)
        self.known[self.id] += 1
        return self.id, self.known[self.id]

    def knows(self, place: tuple[int, int]) -> bool:
        """Returns whether work at `place` is done before anything launched here from now on."""
        return self.known.get(place[0], 0) >= place[1]

    def wait_event(self, event: Event) -> None:
        """Lets later work wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """Lets later work wait for what another stream has been given."""
        self._device.check_stream(self)
        self._device.check_stream(stream)
        merge(self.known, stream.known)

    def synchronize(self) -> None:
        """Lets the host wait for the stream."""
        self._device.wait("Stream.synchronize", self.known)


class Accesses:
    """Orders the accesses to one block of memory.  written: by the last write.  read: by stream, since then."""

    def __init__(self) -> None:
        self.written: tuple[int, int] | None = None
        self.read: Known = {}

    def places(self, with_reads: bool) -> list[tuple[int, int]]:
        """Returns what an access must come after: the last write, and for a write all reads."""
        return [*([self.written] if self.written else []), *(self.read.items() if with_reads else ())]

    def note(self, place: tuple[int, int], writes: bool) -> None:
        """Adds an access."""
        if writes:
            self.written, self.read = place, {}
        else:
            merge(self.read, dict([place]))
