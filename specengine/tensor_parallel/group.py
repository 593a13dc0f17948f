"""The other ranks as the first one sees them: processes that it starts, tells what to do, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch

from specengine import _C
from specengine.tensor_parallel.connection import Connection, Forget, Ready, Start, framed, framed_rows
from specengine.types import RankFailed

PATIENCE = 30.0  # seconds in which a rank must answer; its requests end with an error then
LOADING = 600.0  # seconds in which it must have read its part
_ENDING = 1.0  # seconds in which the system tells how a process ended whose connection is closed
_REAPING = 10.0  # seconds in which a killed process is gone, unless a disk that hangs keeps it

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from specengine.tensor_parallel.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class Group:
    """The ranks from 1 on. Every message is one to all of them, in one order, whoever sends it.

    What fails between them leaves them out of step, so it ends the group for good.
    """

    def __init__(self, size: int, path: str, dtype: str) -> None:
        self._failure: str | None = None
        self._patience = LOADING
        self._lock = threading.Lock()
        self._numbers = count()
        self._forgotten: deque[int] = deque()
        self._ranks = _Ranks(size)
        self._end = weakref.finalize(self, self._ranks.close)
        with self._failing():
            self._ranks.start(path, dtype)

    def join(self) -> None:
        """Waits until all have read their part. Raises RankFailed."""
        with self._failing():
            self._ranks.join()
            self._patience = PATIENCE
            self._ranks.limit(PATIENCE)

    def close(self) -> None:
        """Ends the other processes."""
        self._failure = self._failure or "it was closed"
        self._end()

    @property
    def failure(self) -> str | None:
        """Why the group serves no more; None: it does, as far as can be seen without asking anybody."""
        return self._failure or self._ranks.ended

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """All ranks' x [M, widths[rank]] side by side; in a `together`."""
        return self._ranks.gather(x, widths)

    @contextmanager
    def together(self, message: object) -> Iterator[None]:
        """All ranks act on a message; what this one does is done inside. Raises RankFailed."""
        with self._lock:
            self._check()
            with self._failing():
                self._tell_forgotten()
                self._ranks.tell(message)
                yield

    def new_cache(self) -> int:
        """The number of a cache of all ranks."""
        return next(self._numbers)

    def forget(self, cache: int) -> None:
        """Nobody uses a cache any more. The garbage collector may say so at any moment, so it takes no lock."""
        self._forgotten.append(cache)

    def _tell_forgotten(self) -> None:
        caches = tuple(self._forgotten.popleft() for _ in range(len(self._forgotten)))
        if caches:
            self._ranks.tell(Forget(caches))

    def _check(self) -> None:
        if os.getpid() != self._ranks.owner:
            raise RankFailed(
                "tensor_parallel: the engine's processes belong to the process that made it, not to a fork"
            )
        if self._failure is not None:
            raise RankFailed(f"tensor_parallel: {self._failure}; make a new engine")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = self._what_this_rank_met(error)  # at once: a second interrupt may come
            try:
                if not isinstance(error, Exception):
                    raise
                self._failure = self._ranks.what_happened() or self._failure  # a rank's end is the cause of all else
            finally:
                self._end()
            raise RankFailed(f"tensor_parallel: {self._failure}") from error

    def _what_this_rank_met(self, error: BaseException) -> str:
        if isinstance(error, BlockingIOError):
            return f"{self._ranks.silent} did not answer within {self._patience:g} s"
        return f"rank 0 failed: {type(error).__name__}: {error}"


class _Ranks:
    """What has to be let go of. It knows no Group, which may be collected while this one ends the processes."""

    def __init__(self, size: int) -> None:
        self.size, self.owner = size, os.getpid()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        _threads.share(size)

    @property
    def ended(self) -> str | None:
        """How the first of them ended that is no more. Any thread may ask: nothing is read."""
        for rank, process in enumerate(self._processes, start=1):
            if (status := process.poll()) is not None:
                return f"rank {rank} (process {process.pid}) {_how(status)}"
        return None

    @property
    def silent(self) -> str:
        """The first of them that was waited for in vain."""
        ranks = enumerate(zip(self._processes, self._connections, strict=False), start=1)
        return next(
            (f"rank {rank} (process {process.pid})" for rank, (process, end) in ranks if end.silent), "a process"
        )

    def start(self, path: str, dtype: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(_C.num_threads())}
        places = json.dumps([*map(str, sys.path), str(Path(__file__).parents[2])])
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            connection = Connection(ours)
            self._connections.append(connection)
            with theirs:
                numbers = [str(theirs.fileno()), str(self.owner)]
                self._processes.append(
                    # -I: no module of the working directory is taken for one of ours.  In a session of its own: Ctrl-C
                    # in a terminal is for us.
                    subprocess.Popen(
                        [sys.executable, "-I", "-c", _COMMAND, places, *numbers],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                )
            connection.limit(LOADING)
            connection.send(framed(Start(rank, self.size, path, dtype, _C.instruction_set())))

    def join(self) -> None:
        for connection in self._connections:
            if not isinstance(connection.receive(), Ready):
                raise TypeError("a rank said something else than that it is ready")

    def limit(self, seconds: float) -> None:
        for connection in self._connections:
            connection.limit(seconds)

    def tell(self, message: object) -> None:
        data = framed(message)
        for connection in self._connections:
            connection.send(data)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        # Nobody sends to one who sends: the others wait for the whole when their part is gone.
        others = [end.receive_rows(len(x), width) for end, width in zip(self._connections, widths[1:], strict=True)]
        whole = torch.cat([x, *others], dim=1)
        data = framed_rows(whole)
        for connection in self._connections:
            connection.send(data)
        return whole

    def what_happened(self) -> str | None:
        """How a rank failed; None: all are alive and say nothing of it, as far as can be seen."""
        deadline = time.monotonic() + _ENDING
        while not self.ended and not any(end.last_word for end in self._connections) and time.monotonic() < deadline:
            time.sleep(0.01)
        for rank, (process, end) in enumerate(zip(self._processes, self._connections, strict=False), start=1):
            status = process.poll()
            if status is not None and not end.last_word:
                end.hear_out()
            if end.last_word or status is not None:
                how = f"failed: {end.last_word}" if end.last_word else _how(status)
                return f"rank {rank} (process {process.pid}) {how}"
        return None

    def close(self) -> None:
        if os.getpid() != self.owner:  # a fork's child: none of this is its own
            return
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAPING)
        for connection in self._connections:
            connection.close()
        _threads.unshare(self.size)


def _how(status: int | None) -> str:
    assert status is not None
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


class _Threads:
    """This process's share of its threads, as long as it shares the machine with other ranks."""

    def __init__(self) -> None:
        self._whole, self._sizes = 0, list[int]()

    def share(self, size: int) -> None:
        if not self._sizes:
            self._whole = _C.num_threads()
        self._sizes.append(size)
        self._set()

    def unshare(self, size: int) -> None:
        self._sizes.remove(size)
        self._set()

    def _set(self) -> None:
        _C.set_num_threads(max(1, self._whole // max(self._sizes, default=1)))


_threads = _Threads()
