"""Renders chat templates in a separate process, which is killed when a template exceeds its limits.

A single operation of Jinja's language can take hours or all memory (`10 ** 10 ** 10`), and no thread can interrupt it.
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
    owner: int  # id of the process that started it; after a fork its pipes belong to the parent


class TemplateProcess:
    """Renders one text at a time for all threads. The process starts at the first text, and again after its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def render(self, template: str, variables: Mapping[str, Any]) -> str:
        """Renders a template. Raises ValueError naming the template's error or the limit that it exceeded."""
        try:
            request = json.dumps({"template": template, "variables": variables}).encode() + b"\n"
        except (TypeError, RecursionError) as error:
            raise ValueError(f"a variable is not a JSON value: {error}") from None
        with self._lock:
            child = self._running_child()
            try:
                child.requests.write(request)
                child.requests.flush()
                line = child.replies.readline()
            except BrokenPipeError:
                line = b""
            except BaseException:  # KeyboardInterrupt: the next call must not read this reply
                self._end(child)
                raise
            if not line.endswith(b"\n"):
                raise ValueError(_describe_end(self._end(child)))
        reply = json.loads(line.decode("utf-8", "surrogatepass"))
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["text"]

    def _running_child(self) -> _Child:
        child = self._child
        if child is None or child.owner != os.getpid() or child.process.poll() is not None:
            # -I and -S ignore the environment and site configuration; sys.path is an argument
            command = [sys.executable, "-I", "-S", str(_CHILD), json.dumps(sys.path)]
            pipe = subprocess.PIPE
            try:  # a new session, so that Ctrl-C in a terminal does not end it
                process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except OSError as error:
                raise ValueError(f"the process that runs templates cannot start: {error}") from error
            assert process.stdin is not None and process.stdout is not None  # both are pipes
            child = self._child = _Child(process, process.stdin, process.stdout, os.getpid())
            atexit.register(self.close)
        return child

    def close(self) -> None:
        """Ends the process. The next text starts a new one."""
        with self._lock:
            if self._child is not None and self._child.owner == os.getpid():
                self._end(self._child)

    def _end(self, child: _Child) -> int:
        self._child = None
        child.process.kill()  # does nothing if the process has ended
        for pipe in (child.requests, child.replies):
            with contextlib.suppress(BrokenPipeError):  # the process did not read all of its input
                pipe.close()
        return child.process.wait()


def _describe_end(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it took more than {template_child.SECONDS:g} s of processor time"
    limit = template_child.MEMORY >> 20
    return f"the process that runs templates ended (status {status}); its memory limit is {limit} MiB"


TEMPLATES = TemplateProcess()
