"""One stand-in device: its streams, its memory, the capture under way, and how work is launched on it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING

import torch

from tests.cuda_standin.allocator import DEFAULT_POOL, Allocator, Block
from tests.cuda_standin.refusals import Refusals
from tests.cuda_standin.streams import Accesses, Known, Stream, merge

if TYPE_CHECKING:
    from tests.cuda_standin.graphs import Graph

CUDA = torch.device("cuda", 0)
Work = Callable[[], object]


class Device:
    """Work runs at once, but the device remembers which of it the host, and every stream, may rely on.

    dry: launches are checked and recorded, never run, and its memory stays zero. It needs no kernels and shows whether
    a program keeps the rules, for whatever values.
    """

    def __init__(self, dry: bool = False) -> None:
        self.dry = dry
        self.refusals = Refusals()
        self.host: Known = {}
        self.allocator = Allocator(self.refusals, self.host)
        self.default_stream = Stream(self)
        self.capture: Graph | None = None  # one at most
        self.launched = 0
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._thread = threading.local()
        self._handles = count(1)

    @property
    def stream(self) -> Stream:
        """The current stream of this thread."""
        return getattr(self._thread, "stream", self.default_stream)

    @stream.setter
    def stream(self, stream: Stream) -> None:
        self._thread.stream = stream

    def captures(self) -> Graph | None:
        """Returns the graph that this thread captures, if it does."""
        return self.capture if self.capture and self.capture.thread == threading.get_ident() else None

    def check_stream(self, stream: Stream) -> None:
        """Refuses work on a stream that another thread captures."""
        if self.capture and self.capture.stream is stream and not self.captures():
            raise self.refusals.refuse("a thread works on a stream that another thread captures")

    def allocate(self, size: int) -> Block:
        """Returns memory of the current stream."""
        stream, graph = self.stream, self.captures()
        self.check_stream(stream)
        if graph and stream is not graph.stream:
            raise self.refusals.refuse("memory is allocated outside of the captured graph's pool during the capture")
        return self.allocator.allocate(size, stream, graph.pool_handle if graph else DEFAULT_POOL)

    def launch(
        self, run: Work, reads: Iterable[Block] = (), writes: Iterable[Block] = (), *, name: str, always: bool = False
    ) -> None:
        """Runs work on the current stream, or records it there during a capture; always: on a dry device too."""
        self.check_stream(self.stream)
        if graph := self.captures():
            if self.stream is not graph.stream:
                raise self.refusals.refuse(f"{name}: is launched beside the stream that its thread captures")
            graph.record(run, reads, writes, always)
            return
        self.order(reads, writes, name)
        self.launched += 1
        if always or not self.dry:
            run()

    def order(self, reads: Iterable[Block], writes: Iterable[Block], name: str) -> None:
        """Counts a launch on the current stream, which must come after what other streams did with its memory."""
        stream = self.stream
        place = stream.launch()
        written = list(dict.fromkeys(writes))
        for block, writing in [*((b, False) for b in dict.fromkeys(reads)), *((b, True) for b in written)]:
            if not all(stream.knows(other) for other in block.accesses.places(writing)):
                raise self.refusals.refuse(f"{name}: uses memory that another stream may still be using")
            block.accesses.note(place, writing)

    def wait(self, name: str, known: Known | None = None) -> None:
        """Lets the host wait: for the current stream, or for what is `known`. Refused during a capture."""
        if self.captures():
            raise self.refusals.refuse(f"{name}: the host waits for the device during a capture")
        self.check_stream(self.stream)
        merge(self.host, self.stream.known if known is None else known)

    def host_uses(self, accesses: Accesses, writes: bool, name: str) -> None:
        """Refuses the host memory that the device may still be using."""
        for stream, work in accesses.places(writes):
            if self.host.get(stream, 0) < work:
                raise self.refusals.refuse(f"{name}: the host uses memory that the device may still be using")

    def new_handle(self) -> tuple[int, int]:
        """Returns the handle of a new private pool."""
        return 0, next(self._handles)

    def new_stream(self) -> Stream:
        """Makes a stream that no other stream waits for."""
        stream = Stream(self)
        self._streams.add(stream)
        return stream

    def synchronize(self, device: object = None) -> None:
        """Lets the host wait for all streams. Refused while any thread captures one of them."""
        if self.capture:
            raise self.refusals.refuse("synchronize: the device has a stream that is being captured")
        for stream in [self.default_stream, *self._streams]:
            merge(self.host, stream.known)

    def empty_cache(self) -> None:
        """Gives unused memory back. Refused while any thread captures."""
        if self.capture:
            raise self.refusals.refuse("empty_cache: captures_underway.empty()")
        self.allocator.empty_cache()
