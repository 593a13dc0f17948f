"""A copy of the clone for plant_bugs.py: it is built incrementally, and tests run in it up to the first failure.

As a plugin of pytest (-p planted_copy) this module writes a line for the start and for every phase of a test.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOG = "PLANTED_BUG_LOG"
UNNAMED = "(start of pytest)"  # in place of a test, where none had begun


@dataclass
class Outcome:
    """What a run of tests showed. caught_by: the failing test's id. how: failed, hang or crash."""

    caught_by: str | None = None
    how: str | None = None
    stage: str | None = None
    marks: str | None = None
    tests: int = 0
    test_seconds: float = 0.0
    wall_seconds: float = 0.0
    passed: list[str] = field(default_factory=list)  # stages and marks without a failure


class Copy:
    """A copy of the clone, in which sources are changed and tests run."""

    def __init__(self, folder: Path, root: Path = ROOT):
        self.folder, self.root = folder, root
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        # without the variables of a pytest that runs this, which would make a worker of the tests' own
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        self.environment = {**own, "PATH": path, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'bench'}"}
        self.environment.setdefault("OMP_NUM_THREADS", "1")
        if shutil.which("ccache"):
            self.environment.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
        self._bring_up_to_date()

    def _bring_up_to_date(self) -> None:
        listed = subprocess.run(
            ["git", "-C", str(self.root), "ls-files", "-zco", "--exclude-standard"], check=True, stdout=subprocess.PIPE
        )
        names = {name for name in listed.stdout.decode().split("\0") if (self.root / name).is_file()}
        for name in names:
            source, target = self.root / name, self.folder / name
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)  # with a new time: builds must see the change
        for folder in ("specengine", "csrc", "tests", "bench"):
            for path in (self.folder / folder).rglob("*"):
                known = str(path.relative_to(self.folder)) in names
                if path.is_file() and not known and path.suffix not in (".so", ".pyc"):
                    path.unlink()

    def build(self, kind: str) -> float:
        """Brings the core up to date, for CUDA also the simulator. Returns seconds; raises RuntimeError."""
        began, core = time.monotonic(), self.folder / "build" / "core"
        if not (core / "build.ninja").exists():
            pybind = self._run(sys.executable, "-m", "pybind11", "--cmakedir").strip()
            options = {
                "SPECENGINE_CUDA": "OFF",
                "Python_EXECUTABLE": sys.executable,
                "pybind11_DIR": pybind,
                "CMAKE_LIBRARY_OUTPUT_DIRECTORY": self.folder / "specengine" / "_C",
            }
            defined = [f"-D{name}={value}" for name, value in options.items()]
            self._run("cmake", "-S", str(self.folder), "-B", str(core), "-G", "Ninja", *defined)
        self._run("cmake", "--build", str(core))
        if kind == "cuda":
            self._run(sys.executable, "-c", "from tests.simulator.build import simulator; simulator()")
        return time.monotonic() - began

    def about(self) -> dict[str, Any]:
        """Returns the commit and the machine of a run."""
        describe = ["git", "-C", str(self.root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        self.build("python")
        program = "import json; from specengine.bench.machine import machine; print(json.dumps(machine()))"
        return {"commit": self._run(*describe).strip(), "machine": json.loads(self._run(sys.executable, "-c", program))}

    def _run(self, *command: str) -> str:
        result = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout[-4000:]}")
        return result.stdout

    def test(self, paths: Sequence[str], marks: str, hang: float, workers: int = 0) -> Outcome:
        """Runs tests up to the first failure. hang: seconds without a finished test that count as one."""
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            log, output = Path(scratch, "log"), Path(scratch, "output")
            log.touch()
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "planted_copy", "-p", "no:cacheprovider"]
            command += ["-n", str(workers), "-m", marks, *paths]
            with output.open("w") as out:
                process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env={**self.environment, LOG: str(log)},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    hangs = _is_silent(process, log, hang)
                finally:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)  # workers and ranks too
                        process.wait()
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            text = output.read_text(errors="replace")
        return _outcome(lines, process.returncode, hangs, text, time.monotonic() - began)


def _is_silent(process: subprocess.Popen, log: Path, seconds: float) -> bool:
    """Waits for a process; True if it wrote nothing to its log for so long."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        if (now := log.stat().st_size) != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > seconds:
            return True
    return False


def _outcome(lines: Iterable[dict[str, Any]], code: int, hangs: bool, text: str, wall: float) -> Outcome:
    ended = [line for line in lines if "outcome" in line]
    found = Outcome(
        tests=len({line["id"] for line in ended}),
        test_seconds=sum(line["seconds"] for line in ended),
        wall_seconds=wall,
    )
    failed = [line["id"] for line in ended if line["outcome"] == "failed"]
    running = [line["id"] for line in lines if "outcome" not in line][-1:]
    if failed:
        found.caught_by, found.how = failed[0], "failed"
    elif hangs or code < 0 or code > 128:
        found.caught_by, found.how = running[0] if running else UNNAMED, "hang" if hangs else "crash"
    elif code not in (0, 5):  # 5: the marks select nothing here
        raise RuntimeError(f"pytest ended with {code}:\n{text[-4000:]}")
    return found


def _note(**line: Any) -> None:
    if LOG in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(os.environ[LOG], "a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(id=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    _note(id=report.nodeid, outcome=report.outcome, seconds=report.duration)


def pytest_collectreport(report: Any) -> None:
    if report.outcome == "failed":
        _note(id=report.nodeid, outcome="failed", seconds=0.0)
