"""The group of ranks that share a model, as the first rank sees it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count

import torch

from specengine.tensor_parallel.device.messages import DropGraphs
from specengine.tensor_parallel.messages import DropCaches
from specengine.tensor_parallel.rank_processes import LOADING_SECONDS, RankProcesses
from specengine.types import RankFailed

ANSWER_SECONDS = 30.0  # in which a rank must answer; then its requests end with an error


class Group:
    """The ranks from 1 on. Every message goes to all of them, in one order, whichever thread sends it.

    An error between them leaves them out of step, so it ends the group for good.
    """

    def __init__(self, size: int, path: str, dtype: str, device: torch.device, strict: bool) -> None:
        """Starts the other ranks.  path: of the checkpoint.  device: of rank 0; the others have those behind it."""
        self._failure: str | None = None
        self._timeout = LOADING_SECONDS
        self._lock = threading.Lock()
        self._cache_numbers = count()
        self._dropped_caches, self._dropped_graphs = deque[int](), deque[int]()
        self._ranks = RankProcesses(size)
        self._end = weakref.finalize(self, self._ranks.close)
        with self._closing_on_error():
            self._ranks.start(path, dtype, device, strict)

    def join(self) -> None:
        """Waits until all ranks have read their parts. Raises RankFailed."""
        with self._closing_on_error():
            self._ranks.join()
            self._timeout = ANSWER_SECONDS
            self._ranks.set_timeout(ANSWER_SECONDS)

    def close(self) -> None:
        """Ends the other processes."""
        self._failure = self._failure or "it was closed"
        self._end()

    @property
    def failure(self) -> str | None:
        """The reason why the group serves no more requests; None while it does. No rank is asked."""
        return self._failure or self._ranks.ended

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Puts all ranks' x [M, widths[rank]] side by side; it runs inside a broadcast()."""
        return self._ranks.gather(x, widths)

    @contextmanager
    def broadcast(self, message: object) -> Iterator[None]:
        """Sends a message to all ranks; the body does this rank's part of the work. Raises RankFailed."""
        with self._lock:
            self._check()
            with self._closing_on_error():
                self._send_dropped()
                self._ranks.send(message)
                yield

    def call_after_end(self, end: Callable[[], None]) -> None:
        """Calls `end` in a thread of its own once a rank has ended or hangs; with the group all end.

        Whatever the first rank waits for meanwhile, it must not wait for that rank.
        """
        self._ranks.call_after_end(end)

    def waiting(self) -> AbstractContextManager[None]:
        """Waits for a device in its body; see RankProcesses.waiting()."""
        return self._ranks.waiting()

    def new_cache(self) -> int:
        """Returns the number of a new cache, the same in all ranks."""
        return next(self._cache_numbers)

    def drop_cache(self, cache: int) -> None:
        """Frees a cache in all ranks at the next message.

        It takes no lock: the garbage collector may call it at any moment.
        """
        self._dropped_caches.append(cache)

    def drop_graph(self, graph: int) -> None:
        """Frees a graph in all ranks at the next message; as drop_cache()."""
        self._dropped_graphs.append(graph)

    def _send_dropped(self) -> None:
        for message, dropped in ((DropCaches, self._dropped_caches), (DropGraphs, self._dropped_graphs)):
            if numbers := tuple(dropped.popleft() for _ in range(len(dropped))):
                self._ranks.send(message(numbers))

    def _check(self) -> None:
        if os.getpid() != self._ranks.owner:
            raise RankFailed(
                "tensor_parallel: the engine's processes belong to the process that made it, not to a fork"
            )
        if self._failure is not None:
            raise RankFailed(f"tensor_parallel: {self._failure}; make a new engine")

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = self._described(error)  # at once: a second interrupt may follow
            try:
                if not isinstance(error, Exception):
                    raise
                # the end of a rank causes all other errors
                self._failure = self._ranks.find_failure() or self._failure
            finally:
                self._end()
            raise RankFailed(f"tensor_parallel: {self._failure}") from error

    def _described(self, error: BaseException) -> str:
        if isinstance(error, BlockingIOError):
            return f"{self._ranks.silent} did not answer within {self._timeout:g} s"
        return f"rank 0 failed: {type(error).__name__}: {error}"
