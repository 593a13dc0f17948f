"""Runs the steps on a GPU and writes what each measured: see bench/gpu.sh."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from core_build import CORE
from needs import lacking
from steps import BENCHES, CHECKS, QUESTIONS, RESULTS, ROOT, TESTS, Step, steps
from targets import Results, Target

SKIPPED, TIMED_OUT = 77, 124  # as automake and timeout have them
SHOWN = 15  # last lines of a step that failed
LEAST = 5  # seconds that a step must have left to be begun


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Returns the options. Exits with 2 for unknown ones."""
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description="Checks and measures the project on a GPU.")
    folder = os.environ.get("OUT") or "bench/results/gpu"
    parser.add_argument("folder", nargs="?", default=folder, help="for log and results")
    parser.add_argument("--dry-run", action="store_true", help="run stand-ins of all steps on a machine without a GPU")
    parser.add_argument("--steps", default="", help="only these steps or groups, separated by commas")
    parser.add_argument("--list", action="store_true", help="only list the steps")
    parser.add_argument("--seconds", type=int, help="for all steps, 570 by default and 1800 of a dry run")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = 1800 if options.dry_run else 570
    return options


def chosen(every: list[Step], names: str) -> list[Step]:
    """Returns the steps of a list of names and groups. Raises ValueError for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [CHECKS, TESTS, BENCHES, *(step.name for step in every)]
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"steps: unknown step {unknown[0]!r}; expected {', '.join(dict.fromkeys(known))}")
    return [step for step in every if not wanted or step.name in wanted or step.group in wanted]


def run(command: list[str], seconds: float, log: Path, environment: dict[str, str]) -> int:
    """Runs a command with its output in a file and returns its exit code, 124 if its time ended."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent, env=environment, start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            # Also what the step left running: it would disturb the next one. Python says where it hung.
            for kind in (signal.SIGABRT, signal.SIGKILL):
                try:
                    os.killpg(process.pid, kind)
                    process.wait(5)
                except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                    continue


def read(path: Path, step: Step, dry: bool) -> tuple[Results, list[Target], str]:
    """Returns the results of a step, what they say, and what is wrong with them."""
    if not path.is_file():
        return {}, [], ""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        found = list(step.reading(results))
        if dry:  # goals are those of a GPU
            found = [replace(target, goal=None) for target in found if target.value is not None]
        return results, found, ""
    except Exception as error:  # of any kind: the next step is worth running
        return {}, [], f"its results cannot be read: {type(error).__name__}: {error}"


@contextmanager
def surroundings(dry: bool) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields a scratch folder and the environment of all steps. A dry run has no GPU and no `gguf`."""
    with tempfile.TemporaryDirectory(prefix="specengine-gpu-") as folder:
        scratch = Path(folder)
        (scratch / "questions.jsonl").write_text('{"turns": ["one turn, of random tokens"]}\n', encoding="utf-8")
        paths = [str(ROOT)] if CORE.exists() or not dry else []  # else the installed package
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        tools = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]  # cmake and ninja may be packages
        environment["PATH"] = os.pathsep.join(tools)
        if dry:
            hidden = scratch / "hidden"
            hidden.mkdir()
            (hidden / "gguf.py").write_text('raise ImportError("a dry run has no gguf")\n', encoding="utf-8")
            paths.insert(0, str(hidden))
            environment["CUDA_VISIBLE_DEVICES"] = ""
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        yield scratch, environment


def results_file(folder: Path, dry: bool) -> Path:
    """Returns the file of all results. A dry run has one of its own, so that it replaces nothing measured."""
    return folder / f"gpu-results{'-dry' if dry else ''}.json"


def keep(folder: Path, entry: dict[str, Any], results: Results) -> None:
    """Adds a step's line to gpu.jsonl and its results to those before, so that a run cut short has all before.

    A step without results replaces none.
    """
    with (folder / "gpu.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(entry) + "\n")
    path = results_file(folder, entry["dry"])
    every = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    every[entry["step"]] = results or every.get(entry["step"], {})
    part = path.with_suffix(".part")
    part.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def main(arguments: list[str]) -> int:
    options = parsed(arguments)
    try:
        built = "" if options.dry_run or CORE.exists() else "build,"
        plan = chosen(steps(options.dry_run), options.steps and built + options.steps)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        for step in plan:
            print(f"{step.name:13} {step.group:8} {step.seconds:4} s  {step.says}")
        return 0
    folder = Path(options.folder).resolve()
    begin = time.monotonic()
    status: dict[str, str] = {}
    every: list[Target] = []
    with surroundings(options.dry_run) as (scratch, environment):
        if lack := lacking(options.dry_run, environment):
            print(lack, file=sys.stderr)
            return 2
        folder.mkdir(parents=True, exist_ok=True)
        for step in plan:
            entry, results, found = attempt(step, options, begin, folder, scratch, environment)
            keep(folder, entry, results)
            status[step.name] = entry["status"]
            every += found
    print(f"results{' of a dry run' if options.dry_run else ''}: {results_file(folder, options.dry_run)}")
    return summary(status, every, time.monotonic() - begin, options)


def attempt(
    step: Step, options: argparse.Namespace, begin: float, folder: Path, scratch: Path, environment: dict[str, str]
) -> tuple[dict[str, Any], Results, list[Target]]:
    """Runs a step and prints what came of it. Returns its line, its results and what was measured."""
    dry = options.dry_run
    note = f" (dry: {step.stand_in})" if dry else ""
    print(f"== {step.name}: {step.says}{note}", flush=True)
    left = options.seconds - (time.monotonic() - begin)
    entry: dict[str, Any] = {"step": step.name, "dry": dry, "command": list(step.command), "measured": []}
    if left < LEAST:
        print(f"{step.name}: left out, no time is left")
        return {**entry, "status": "left out", "rc": None, "seconds": 0.0}, {}, []
    path, log = scratch / f"{step.name}.json", scratch / f"{step.name}.log"
    values = {RESULTS: str(path), QUESTIONS: str(scratch / "questions.jsonl")}
    began = time.monotonic()
    code = run([values.get(word, word) for word in step.command], min(step.seconds, left), log, environment)
    seconds = time.monotonic() - began
    text = log.read_text(encoding="utf-8", errors="replace")
    with (folder / "gpu.log").open("a", encoding="utf-8") as whole:
        whole.write(f"\n== {step.name}: {' '.join(step.command)}\n{text}\n")
    results, found, wrong = read(path, step, dry)
    state = "skipped" if code == SKIPPED else "failed" if code or wrong else "done"
    if code == TIMED_OUT and left < step.seconds:  # the run's time ended, not the step's
        state = "left out"
    if state == "failed":
        why = wrong or ("its time ended" if code == TIMED_OUT else f"exit code {code}")
        print(f"{step.name}: FAILED after {seconds:.0f} s, {why}; its last lines:")
        print(*text.splitlines()[-SHOWN:], sep="\n")
    else:
        last = f": {text.strip().splitlines()[-1].strip()}" if text.strip() and not found else ""
        print(f"{step.name}: {state} in {seconds:.0f} s{last}")
    for target in found:
        print(f"  {target.line()}")
    sys.stdout.flush()
    measured = [target.entry() for target in found]
    return {**entry, "status": state, "rc": code, "seconds": round(seconds, 1), "measured": measured}, results, found


def summary(status: dict[str, str], every: list[Target], seconds: float, options: argparse.Namespace) -> int:
    """Prints all goals and how many steps failed. Returns the exit code."""
    if goals := [target for target in every if target.goal is not None]:
        print("== goals", *(f"  {target.line()}" for target in goals), sep="\n")
    named = {
        kind: [name for name, each in status.items() if each == kind] for kind in ("failed", "skipped", "left out")
    }
    for kind in ("skipped", "left out"):
        if named[kind]:
            print(f"{kind}: {', '.join(named[kind])}")
    if named["left out"]:
        dry = "--dry-run " if options.dry_run else ""
        again = f"--steps {','.join(named['left out'])} {shlex.quote(options.folder)}"
        print(f"run them with: bench/gpu.sh {dry}{again}")
    failed = named["failed"]
    print(f"took {seconds:.0f} s; {len(failed)} failed steps{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed or named["left out"] else 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again at its end
        code = 1
    sys.exit(code)
