"""Damaged inputs by the thousand, guided by the lines of the package they reach: python bench/fuzz.py SECONDS
[--inputs COUNT], of each kind as many as either allows.

Each harness of tests/fuzz runs in a process of its own, which a crash or a hang ends. The guide is atheris where that
is installed, else the lines that a trace sees. Writes {"inputs": .., "harnesses": {name: {"inputs": .., "findings":
{..}}}} as JSON, with the input of each finding in base64.
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
ROOM = 2 << 30  # of address space, beside what the imports took
HANG = 20  # seconds without another input
LONGEST = 1 << 17  # bytes of an input
WEIGHED = 8  # of as many inputs, the memory of one is counted
Try = Callable[[bytes], None]


class Record:
    """What one process tried and found; `current` holds the input under way, for who finds this process dead."""

    def __init__(self, harness: Any, folder: Path) -> None:
        self.harness, self.folder, self.inputs = harness, folder, 0
        self.findings: dict[str, str] = {}
        atexit.register(self.write)

    def attempt(self, data: bytes) -> None:
        from tests.fuzz.contract import violation

        (self.folder / "current").write_bytes(data)
        self.inputs += 1
        weighed = self.inputs % WEIGHED == 0
        if (problem := violation(self.harness, data, self.folder / "files", weighed)) is not None:
            kind = problem[:40] + problem[-30:]  # the place stands at the end
            if kind not in self.findings:
                self.findings[kind] = problem
                (self.folder / f"finding-{len(self.findings)}").write_bytes(data)
        if self.inputs % 100 == 0:
            self.write()

    def write(self) -> None:
        found = {}
        for number, problem in enumerate(self.findings.values(), start=1):
            data = (self.folder / f"finding-{number}").read_bytes()
            found[problem] = base64.b64encode(data).decode()
        (self.folder / "record.part").write_text(json.dumps({"inputs": self.inputs, "findings": found}))
        (self.folder / "record.part").replace(self.folder / "record.json")


def traced(record: Record, seconds: float, inputs: int, seed: int) -> None:
    """Keeps an input that reaches a line of the package which none before did."""
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

    kept, draw, end = list(record.harness.seeds()), Random(seed), time.monotonic() + seconds
    for data in kept[:]:
        attempt(data)
    while time.monotonic() < end and record.inputs < inputs:
        data = record.harness.mutation(kept, draw)
        if len(data) <= LONGEST and attempt(data):
            kept.append(data)


def guided_by_atheris(atheris: Any, record: Record, seconds: float, inputs: int, seed: int) -> None:
    """Ends the process."""
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
    record.attempt(harness.seeds()[0])  # loads what is loaded on first use
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM,) * 2)
    if atheris:
        guided_by_atheris(atheris, record, max(1, seconds), inputs, seed)
    else:
        traced(record, seconds, inputs, seed)


def run(name: str, seconds: float, inputs: int, seed: int) -> dict[str, Any]:
    """What a process found; where it died or hung, another goes on for the rest of the time."""
    total: dict[str, Any] = {"inputs": 0, "findings": {}}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0.5 and total["inputs"] < inputs and len(total["findings"]) < 20:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            limits = [str(left), "--inputs", str(inputs - total["inputs"]), "--seed", str(seed)]
            command = [sys.executable, __file__, *limits, "--child", name, str(folder)]
            with (folder / "errors").open("wb") as errors:
                process = subprocess.Popen(command, stdout=errors, stderr=errors)
            current, last, quiet, hangs = folder / "current", None, 0, False
            while process.poll() is None:
                time.sleep(0.2)
                now = current.stat().st_mtime_ns if current.exists() else None
                # counted rather than timed: where both processes are paused, neither is to blame
                last, quiet = now, quiet + 1 if now == last else 0
                if hangs := quiet * 0.2 > (HANG if now else 10 * HANG):
                    process.kill()
                    process.wait()
            record = folder / "record.json"
            told = json.loads(record.read_text()) if record.exists() else {"inputs": 0, "findings": {}}
            if hangs or process.returncode != 0:
                data = current.read_bytes() if current.exists() else b""
                last_words = (folder / "errors").read_bytes()[-1500:].decode("utf-8", "replace")
                problem = "hang" if hangs else f"the process ended with status {process.returncode}: {last_words}"
                told["findings"][problem] = base64.b64encode(data).decode()
            total["inputs"] += told["inputs"]
            total["findings"] |= told["findings"]
        seed += 1
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float, help="for all harnesses together")
    parser.add_argument("--inputs", type=int, default=1 << 30, help="for each harness")
    parser.add_argument("--only", action="append", help="name of a harness; may be given again")
    parser.add_argument("--out", type=Path, help="file of the result; without it, it is printed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child[0], asked.seconds, asked.inputs, Path(asked.child[1]), asked.seed)
        return
    sys.path.insert(0, str(ROOT))
    from tests.fuzz.harnesses import HARNESSES

    names = [each.name for each in HARNESSES if not asked.only or each.name in asked.only]
    results = {}
    for name in names:
        found = results[name] = run(name, asked.seconds / len(names), asked.inputs, asked.seed)
        print(f"{name}: {found['inputs']} inputs, {len(found['findings'])} findings", flush=True)
        total = sum(each["inputs"] for each in results.values())
        text = json.dumps({"inputs": total, "harnesses": results}, indent=1)
        if asked.out:
            asked.out.write_text(text + "\n", encoding="utf-8")
    if not asked.out and any(each["findings"] for each in results.values()):
        print(text)
    sys.exit(any(each["findings"] for each in results.values()))


if __name__ == "__main__":
    main()
