"""The processes of the other ranks: how they start, how messages reach them, how they end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from specengine import _C
from specengine.tensor_parallel.connection import Connection
from specengine.tensor_parallel.messages import Ready, Start, encode_message, encode_rows
from specengine.tensor_parallel.thread_share import thread_share

LOADING_SECONDS = 600.0  # in which a rank must have read its part
# A cycle of devices may take so long: prompts between two cycles take tens of seconds at most. Then a rank hangs.
CYCLE_SECONDS = 300.0
_ENDING_SECONDS = 1.0  # in which the system reports how a process ended, after its connection closed
_WATCHING_SECONDS = 0.05  # between two looks at the processes: how long a device waits in vain, at most
_REAPING_SECONDS = 10.0  # in which a killed process is gone, unless a hanging disk keeps it

_COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from specengine.tensor_parallel.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class RankProcesses:
    """The processes of the ranks from 1 on, and a connection to each.

    It holds no reference to its Group: close() also runs after the Group was collected.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.owner = os.getpid()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._hung: str | None = None
        self._waits_since: float | None = None  # for a device
        thread_share.add(size)

    @property
    def ended(self) -> str | None:
        """How the first ended rank ended; None while all run. Any thread may ask, because nothing is received."""
        if self._hung is not None:
            return self._hung
        for rank, process in enumerate(self._processes, start=1):
            if (status := process.poll()) is not None:
                return f"rank {rank} (process {process.pid}) {_ending(status)}"
        return None

    @property
    def silent(self) -> str:
        """The first rank that did not answer in time."""
        ranks = enumerate(zip(self._processes, self._connections, strict=False), start=1)
        return next(
            (f"rank {rank} (process {process.pid})" for rank, (process, end) in ranks if end.silent), "a process"
        )

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Waits for a device in its body. After CYCLE_SECONDS a rank hangs, and all are ended."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def call_after_end(self, end: Callable[[], None]) -> None:
        """Calls `end` in a thread of its own once a process has ended or hangs; not while this process exits."""

        def watch() -> None:
            while not self.ended:
                time.sleep(_WATCHING_SECONDS)
                since = self._waits_since
                if since is not None and time.monotonic() - since > CYCLE_SECONDS:
                    self._hung = f"a cycle took longer than {CYCLE_SECONDS:g} s"
                    for process in self._processes:
                        process.kill()
            if threading.main_thread().is_alive():
                end()

        threading.Thread(target=watch, daemon=True).start()

    def start(self, path: str, dtype: str, device: torch.device, strict: bool) -> None:
        """Starts the processes, which begin to read their parts.  device: of this rank."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(_C.num_threads())}
        places = json.dumps([*map(str, sys.path), str(Path(__file__).parents[2])])
        for rank in range(1, self.size):
            ours, theirs = socket.socketpair()
            connection = Connection(ours)
            self._connections.append(connection)
            with theirs:
                numbers = [str(theirs.fileno()), str(self.owner)]
                self._processes.append(
                    # -I: a module in the working directory must not replace one of ours.  A session of its own: Ctrl-C
                    # in a terminal must reach this process only.
                    subprocess.Popen(
                        [sys.executable, "-I", "-c", _COMMAND, places, *numbers],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                    )
                )
            connection.set_timeout(LOADING_SECONDS)
            place = f"cuda:{(device.index or 0) + rank}" if device.type == "cuda" else str(device)
            start = Start(rank, self.size, path, dtype, _C.instruction_set(), place, strict)
            connection.send(encode_message(start))

    def join(self) -> None:
        """Waits until every rank is ready."""
        for connection in self._connections:
            if not isinstance(connection.receive(), Ready):
                raise TypeError("a rank sent another message than Ready")

    def set_timeout(self, seconds: float) -> None:
        """Limits the time in which a rank must answer."""
        for connection in self._connections:
            connection.set_timeout(seconds)

    def send(self, message: object) -> None:
        """Sends a message to every rank."""
        data = encode_message(message)
        for connection in self._connections:
            connection.send(data)

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Receives the other ranks' columns, and sends the whole, float32 [M, sum(widths)], to every rank."""
        # No deadlock: a rank that has sent its columns only waits for the whole, so no two ends send at once.
        others = [end.receive_rows(len(x), width) for end, width in zip(self._connections, widths[1:], strict=True)]
        whole = torch.cat([x, *others], dim=1)
        data = encode_rows(whole)
        for connection in self._connections:
            connection.send(data)
        return whole

    def find_failure(self) -> str | None:
        """Describes how a rank failed; None where all run and none has sent a failure."""
        deadline = time.monotonic() + _ENDING_SECONDS
        while not self.ended and not any(end.failure for end in self._connections) and time.monotonic() < deadline:
            time.sleep(0.01)
        for rank, (process, end) in enumerate(zip(self._processes, self._connections, strict=False), start=1):
            status = process.poll()
            if status is not None and not end.failure:
                end.find_failure()
            if end.failure:
                return f"rank {rank} (process {process.pid}) failed: {end.failure}"
            if status is not None:
                return f"rank {rank} (process {process.pid}) {_ending(status)}"
        return None

    def close(self) -> None:
        """Kills the processes and closes their connections."""
        if os.getpid() != self.owner:  # in the child of a fork, which owns none of them
            return
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_REAPING_SECONDS)
        for connection in self._connections:
            connection.close()
        thread_share.remove(self.size)


def _ending(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
