"""torch.cuda.CUDAGraph over the stand-in: a capture records launches without running them, a replay runs them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.cuda_standin.allocator import DEFAULT_POOL, Block
from tests.cuda_standin.device import Device, Work
from tests.cuda_standin.streams import Stream

if TYPE_CHECKING:
    from tests.cuda_standin.events import Event


class Graph:
    """Captures the launches of one thread on one stream, in a memory pool."""

    device: Device  # set where torch.cuda is replaced
    stream: Stream
    thread: int

    def __init__(self, keep_graph: bool = False) -> None:
        self.pool_handle = DEFAULT_POOL
        self._work: list[tuple[Work, bool]] | None = None  # and whether a dry device runs it too
        self._blocks: dict[weakref.ref[Block], bool] = {}  # whether it is written
        self._outside: list[weakref.ref[Block]] = []  # of other pools
        self._holds = False

    def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False) -> None:
        device = self.device
        if self._work is not None:
            raise device.refusals.refuse("capture_begin: this graph was captured before")
        if device.stream is device.default_stream:
            raise device.refusals.refuse("capture_begin: the default stream cannot be captured")
        if device.capture:
            raise device.refusals.refuse("capture_begin: another capture is under way")
        if capture_error_mode != "thread_local":
            raise device.refusals.refuse("capture_begin: other threads' calls would break a capture of this mode")
        handle = pool or device.new_handle()
        device.allocator.hold(handle)
        self.pool_handle, self._holds = handle, True
        self._work, self.stream, self.thread = [], device.stream, threading.get_ident()
        device.capture = self

    def capture_end(self) -> None:
        device = self.device
        if device.capture is not self or device.captures() is not self or device.stream is not self.stream:
            raise device.refusals.refuse("capture_end: a capture ends in the thread and stream in which it began")
        device.capture = None

    def record(self, run: Work, reads: Iterable[Block], writes: Iterable[Block], always: bool) -> None:
        """Adds a launch."""
        assert self._work is not None
        self._work.append((run, always))
        own = self.device.allocator.pools[self.pool_handle]
        for block, written in [*((b, False) for b in reads), *((b, True) for b in writes)]:
            place = weakref.ref(block)
            if block.pool is not own and place not in self._blocks:
                self._outside.append(place)
            self._blocks[place] = self._blocks.get(place, False) or written

    def record_event(self, event: Event) -> None:
        """Adds an external event."""
        assert self._work is not None
        self._work.append((lambda: event.mark(self.device.stream), True))

    def replay(self) -> None:
        device = self.device
        if self._work is None or device.capture is self:
            raise device.refusals.refuse("replay: nothing was captured")
        if device.captures():
            raise device.refusals.refuse("replay: a graph is launched during a capture")
        device.check_stream(device.stream)
        if any(place() is None for place in self._outside):
            raise device.refusals.refuse("replay: memory that the graph uses was freed after the capture")
        known = [(place(), written) for place, written in self._blocks.items()]
        reads = [block for block, written in known if block and not written]
        writes = [block for block, written in known if block and written]
        device.order(reads, writes, "replay")
        device.launched += 1
        for run, always in self._work:
            if always or not device.dry:
                run()

    def pool(self) -> tuple[int, int]:
        return self.pool_handle

    def reset(self) -> None:
        if self._holds:
            self._holds = False
            if self.device.captures():
                self.device.refusals.refuse("a graph is dropped during a capture")
            self.device.allocator.release(self.pool_handle)
        self._work = None
        self._blocks.clear()

    def __del__(self) -> None:
        self.reset()
