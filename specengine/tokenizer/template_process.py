"""Chat templates rendered in a process of their own, which is ended where one takes too long or too much.

Nothing less bounds a program that comes with a model's files: one operation of Jinja's language can take hours or all
memory (`10 ** 10 ** 10`), and no thread can interrupt it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from specengine.tokenizer import template_child

_CHILD = Path(template_child.__file__)


class _Child(NamedTuple):
    process: subprocess.Popen[bytes]
    requests: IO[bytes]
    replies: IO[bytes]
    owner: int  # process that started it: after a fork its pipes are the other one's


class TemplateProcess:
    """Renders one text at a time for all threads; starts when first asked, and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """The text. Raises ValueError saying what went wrong, or which limit was passed."""
        request = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        with self._lock:
            child = self._started()
            try:
                child.requests.write(request)
                child.requests.flush()
                line = child.replies.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # an interrupt: the answer would be taken for the next one's
                self._end(child)
                raise
            if not line.endswith(b"\n"):
                raise ValueError(_why(self._end(child)))
        reply = json.loads(line.decode("utf-8", "surrogatepass"))
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["text"]

    def _started(self) -> _Child:
        child = self._child
        if child is None or child.owner != os.getpid() or child.process.poll() is not None:
            # -I and -S: nothing of the environment or of site configuration runs there; its path is ours
            command = [sys.executable, "-I", "-S", str(_CHILD), json.dumps(sys.path)]
            pipe = subprocess.PIPE
            try:  # in a session of its own: Ctrl-C in a terminal is for us
                process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise ValueError(f"the process that runs templates cannot start: {error}") from error
            assert process.stdin is not None and process.stdout is not None  # pipes, as asked for
            child = self._child = _Child(process, process.stdin, process.stdout, os.getpid())
            atexit.register(self.close)
        return child

    def close(self) -> None:
        """Ends the process; the next text starts another."""
        with self._lock:
            if self._child is not None and self._child.owner == os.getpid():
                self._end(self._child)

    def _end(self, child: _Child) -> int:
        self._child = None
        child.process.kill()  # does nothing once it has ended by itself
        for pipe in (child.requests, child.replies):
            with contextlib.suppress(BrokenPipeError):  # what it did not take
                pipe.close()
        return child.process.wait()


def _why(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it took more than {template_child.SECONDS:g} s of processor time"
    return f"the process that runs templates ended (status {status}), its memory is {template_child.MEMORY >> 20} MiB"


TEMPLATES = TemplateProcess()
