"""A process that writes a job's file: for each line of its input a fork, which is killed or ends by itself.

Forks, because the imports take seconds. A line is JSON: [job, folder, bytes]. 0 bytes: it writes without end; else
files may grow to so many bytes, and it tells what became of one write.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

from tests.faults.jobs import JOBS


def say(line: str) -> None:
    """In one write: two processes share the pipe."""
    os.write(1, f"{line}\n".encode())


def work(name: str, folder: str, most_bytes: int) -> None:
    steps = JOBS[name].write(Path(folder))
    if not most_bytes:
        next(steps)
        say("writing")
        for _ in steps:
            pass
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error of it then
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    try:
        next(steps)
        said = "written"
    except Exception as error:
        kind = "OSError" if isinstance(error, OSError) else type(error).__name__
        said = f"{kind}: {error}".replace("\n", "\\n")
    say(said)


if __name__ == "__main__":
    say("ready")
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            name, folder, most_bytes = json.loads(line)
            work(name, folder, most_bytes)
            os._exit(0)
        say(str(pid))
        os.waitpid(pid, 0)
        say("ended")
