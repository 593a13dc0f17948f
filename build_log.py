"""Writes what a build prints to a file as well, as pip shows a build's output only with -v."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

PROGRESS = "[%f/%t, %e s] "  # of ninja's lines: steps done, all steps, seconds


class BuildLog:
    """A new log for each build; without one, where it cannot be written, the build goes on and says so."""

    def __init__(self, path: Path | None) -> None:
        self._files = ExitStack()
        self._outputs: list[TextIO] = [sys.stdout]
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # a build that runs beside this one keeps its own
            self._outputs.append(self._files.enter_context(path.open("x", encoding="utf-8")))
        except OSError as error:
            self.say(f"specengine: the build has no log: {error}")
        else:
            self.say(f"specengine: to follow this build: tail -F {path}")

    def __enter__(self) -> BuildLog:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a full disk; say() has reported it
            self._files.close()

    def say(self, line: str) -> None:
        """Prints a line, and writes it to the log."""
        for output in list(self._outputs):
            try:
                print(line.rstrip("\n"), file=output, flush=True)
            except OSError as error:
                if output is sys.stdout:
                    raise
                self._outputs.remove(output)
                self.say(f"specengine: the log ends here: {error}")

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Runs a command, whose output and time are said. Raises CalledProcessError where it fails."""
        begin = time.monotonic()
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        settings = {"NINJA_STATUS": PROGRESS, **environment}
        with subprocess.Popen(command, **pipes, text=True, errors="replace", env=settings) as process:
            for line in process.stdout:
                self.say(line)
        seconds = time.monotonic() - begin
        self.say(f"specengine: {command[0]} ended after {seconds:.0f} s with status {process.returncode}")
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
