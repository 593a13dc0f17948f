"""Tries thousands of damaged inputs, guided by the lines of the package that they reach.

python bench/fuzz.py SECONDS [--inputs COUNT]: each harness of tests/fuzz runs in a process of its own until SECONDS or
COUNT end; a crash or a hang ends the process. atheris guides the inputs if it is installed, else the lines that a trace
records. Writes {"inputs": .., "harnesses": {name: {"inputs": .., "findings": {..}}}} as JSON, with the input of each
finding in base64.
"""

from __future__ import annotations

import argparse
import atexit
import base64
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOM = 2 << 30  # bytes of address space beyond those of the imports
HANG = 20  # seconds without a new input
LONGEST = 1 << 17  # bytes of an input
WEIGHED = 8  # the memory of every eighth input is counted
Try = Callable[[bytes], None]


class Record:
    """Records the inputs and findings of one process. The file `current` holds the last input, in case of a crash."""

    def __init__(self, harness: Any, folder: Path) -> None:
        self.harness = harness
        self.folder = folder
        self.inputs = 0
        self.findings: dict[str, str] = {}
        atexit.register(self.write)

    def attempt(self, data: bytes) -> None:
        """Tries one input, and keeps it if it breaks the contract."""
        from tests.fuzz.contract import violation

        (self.folder / "current").write_bytes(data)
        self.inputs += 1
        weighed = self.inputs % WEIGHED == 0
        if (problem := violation(self.harness, data, self.folder / "files", weighed)) is not None:
            kind = problem[:40] + problem[-30:]  # the place in the code is at the end
            if kind not in self.findings:
                self.findings[kind] = problem
                (self.folder / f"finding-{len(self.findings)}").write_bytes(data)
        if self.inputs % 100 == 0:
            self.write()

    def write(self) -> None:
        """Writes the record so far."""
        findings = {}
        for number, problem in enumerate(self.findings.values(), start=1):
            data = (self.folder / f"finding-{number}").read_bytes()
            findings[problem] = base64.b64encode(data).decode()
        (self.folder / "record.part").write_text(json.dumps({"inputs": self.inputs, "findings": findings}))
        (self.folder / "record.part").replace(self.folder / "record.json")


def traced(record: Record, seconds: float, inputs: int, seed: int) -> None:
    """Mutates inputs, and keeps each input that reaches a new line of the package."""
    seen: set[tuple[str, int]] = set()

    def enter(frame: Any, event: str, _: Any) -> Any:
        return line if "/specengine/" in frame.f_code.co_filename else None

    def line(frame: Any, event: str, _: Any) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return line

    def attempt(data: bytes) -> bool:
        known = len(seen)
        sys.settrace(enter)
        try:
            record.attempt(data)
        finally:
            sys.settrace(None)
        return len(seen) > known

    kept = list(record.harness.seeds())
    draw = Random(seed)
    end = time.monotonic() + seconds
    for data in kept[:]:
        attempt(data)
    while time.monotonic() < end and record.inputs < inputs:
        data = record.harness.mutation(kept, draw)
        if len(data) <= LONGEST and attempt(data):
            kept.append(data)


def guided_by_atheris(atheris: Any, record: Record, seconds: float, inputs: int, seed: int) -> None:
    """Lets atheris choose inputs. It ends the process."""
    corpus = record.folder / "corpus"
    corpus.mkdir()
    seeds = list(record.harness.seeds())
    for number, data in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(data)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        return record.harness.mutation([data, *seeds] if data else seeds, Random(number))[:most]

    ends = (f"-max_total_time={seconds:.0f}", f"-runs={inputs}")
    limits = (f"-max_len={LONGEST}", "-timeout=1000000", "-rss_limit_mb=0", f"-seed={seed}")
    atheris.Setup([sys.argv[0], *ends, *limits, str(corpus)], record.attempt, custom_mutator=mutate)
    atheris.Fuzz()


def child(name: str, seconds: float, inputs: int, folder: Path, seed: int) -> None:
    """Runs one harness in this process."""
    sys.path.insert(0, str(ROOT))
    try:
        import atheris
    except ImportError:
        atheris = None
    if atheris:
        with atheris.instrument_imports(include=["specengine"]):
            from tests.fuzz.harnesses import HARNESSES
    else:
        from tests.fuzz.harnesses import HARNESSES
    harness = next(each for each in HARNESSES if each.name == name)
    record = Record(harness, folder)
    record.attempt(harness.seeds()[0])  # loads lazy imports before the limit of memory is set
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if atheris:
        guided_by_atheris(atheris, record, max(1, seconds), inputs, seed)
    else:
        traced(record, seconds, inputs, seed)


def run(name: str, seconds: float, inputs: int, seed: int) -> dict[str, Any]:
    """Runs a harness in child processes, a new one after each crash or hang. Returns inputs and findings."""
    total: dict[str, Any] = {"inputs": 0, "findings": {}}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0.5 and total["inputs"] < inputs and len(total["findings"]) < 20:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            limits = [str(left), "--inputs", str(inputs - total["inputs"]), "--seed", str(seed)]
            command = [sys.executable, __file__, *limits, "--child", name, str(folder)]
            with (folder / "errors").open("wb") as errors:
                process = subprocess.Popen(command, stdout=errors, stderr=errors)
            current = folder / "current"
            last = None
            quiet = 0
            hangs = False
            while process.poll() is None:
                time.sleep(0.2)
                now = current.stat().st_mtime_ns if current.exists() else None
                # Intervals are counted, not timed, because both processes may be paused.
                quiet = quiet + 1 if now == last else 0
                last = now
                if hangs := quiet * 0.2 > (HANG if now else 10 * HANG):
                    process.kill()
                    process.wait()
            record = folder / "record.json"
            done = json.loads(record.read_text()) if record.exists() else {"inputs": 0, "findings": {}}
            if hangs or process.returncode != 0:
                data = current.read_bytes() if current.exists() else b""
                last_output = (folder / "errors").read_bytes()[-1500:].decode("utf-8", "replace")
                problem = "hang" if hangs else f"the process ended with status {process.returncode}: {last_output}"
                done["findings"][problem] = base64.b64encode(data).decode()
            total["inputs"] += done["inputs"]
            total["findings"] |= done["findings"]
        seed += 1
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float, help="for all harnesses together")
    parser.add_argument("--inputs", type=int, default=1 << 30, help="for each harness")
    parser.add_argument("--only", action="append", help="name of a harness; may be repeated")
    parser.add_argument("--out", type=Path, help="file of the result; by default it is printed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], given.seconds, given.inputs, Path(given.child[1]), given.seed)
        return
    sys.path.insert(0, str(ROOT))
    from tests.fuzz.harnesses import HARNESSES

    names = [each.name for each in HARNESSES if not given.only or each.name in given.only]
    results = {}
    for name in names:
        found = results[name] = run(name, given.seconds / len(names), given.inputs, given.seed)
        print(f"{name}: {found['inputs']} inputs, {len(found['findings'])} findings", flush=True)
        total = sum(each["inputs"] for each in results.values())
        text = json.dumps({"inputs": total, "harnesses": results}, indent=1)
        if given.out:
            given.out.write_text(text + "\n", encoding="utf-8")
    if not given.out and any(each["findings"] for each in results.values()):
        print(text)
    sys.exit(any(each["findings"] for each in results.values()))


if __name__ == "__main__":
    main()
