"""Plants bugs one at a time and records which test catches each: python bench/plant_bugs.py OUT.json [--bugs NAME ...]

A bug is a text of a source and another one in its place (bench/planted_bugs). The text must occur exactly once, so that
the list keeps up with the code. Everything happens in a copy of the clone, build/planted-bugs, which is built
incrementally, with ccache where it is installed.

Tests run until one fails, those likely to catch a bug first: the files that the bug names, then their folders, then all
that the bug's kind selects. A hang and a crash of the interpreter count as caught. At the end every test that caught a
bug must pass on the clean copy.
"""

from __future__ import annotations

import argparse
import json
import runpy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planted_copy import ROOT, UNNAMED, Copy, Outcome

LISTS = Path(__file__).resolve().parent / "planted_bugs"
PLAIN = "not full and not slow and not docs and not sim"
# Of each kind of bug, what its tests are selected by, the quick ones first.
MARKS = {"cpu": [PLAIN], "python": [PLAIN], "cuda": ["sim and not slow and not full", "sim and not slow"]}
STAGES = ("files", "folders", "all")


@dataclass(frozen=True)
class Bug:
    """One planted bug. file: a glob below the clone. tests: globs of the test files that are run first."""

    name: str
    kind: str
    room: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self, root: Path) -> Path:
        """The file with the text. Raises ValueError unless it occurs exactly once in all files of the glob."""
        found = [(path, path.read_text(encoding="utf-8").count(self.old)) for path in sorted(root.glob(self.file))]
        times = sum(count for _, count in found)
        if times != 1 or self.old == self.new:
            raise ValueError(
                f"{self.name}: expected its text once in {self.file}, found it {times} times: {self.old!r}"
            )
        return next(path for path, count in found if count)

    def test_files(self, root: Path) -> list[str]:
        """The test files that its globs find. Raises ValueError where one of them finds none."""
        files = []
        for pattern in self.tests:
            found = sorted(path for path in root.glob(pattern) if path.name.startswith("test_"))
            if not found:
                raise ValueError(f"{self.name}: no test file is called {pattern}")
            files += [str(path.relative_to(root)) for path in found]
        return list(dict.fromkeys(files))


def read_bugs(folder: Path) -> list[Bug]:
    """The bugs of every list of a folder, which is named for their kind; BUGS: room -> (tests, bugs by name)."""
    bugs = []
    for path in sorted(folder.glob("*.py")):
        for room, (tests, listed) in runpy.run_path(str(path))["BUGS"].items():
            for name, (file, old, new) in listed.items():
                bugs.append(Bug(name, path.stem, room, file, old, new, tuple(tests.split())))
    names = [bug.name for bug in bugs]
    if len(set(names)) < len(names):
        raise ValueError(f"two bugs are called {next(name for name in names if names.count(name) > 1)}")
    return bugs


def stages(bug: Bug, root: Path, until: str) -> Iterable[tuple[str, list[str]]]:
    """What to run in turn, until a stage: the bug's files, their folders, everything."""
    files = bug.test_files(root)
    paths = {"files": files, "folders": sorted({str(Path(file).parent) for file in files}), "all": []}
    for stage in STAGES[: STAGES.index(until) + 1]:
        yield stage, paths[stage]


def catch(copy: Copy, bug: Bug, until: str, hang: float) -> Outcome:
    """Runs the stages of tests on the copy as it is, up to the first that fails."""
    total = Outcome()
    for stage, paths in stages(bug, copy.folder, until):
        for marks in MARKS[bug.kind]:
            found = copy.test(paths, marks, hang, workers=2 if stage == "all" else 0)
            total.tests += found.tests
            total.test_seconds += found.test_seconds
            total.wall_seconds += found.wall_seconds
            if found.caught_by:
                total.caught_by, total.how, total.stage, total.marks = found.caught_by, found.how, stage, marks
                return total
            total.passed.append(f"{stage}: {marks}")
    return total


def plant(copy: Copy, bug: Bug, until: str, hang: float) -> dict[str, Any]:
    """Plants a bug, builds, tests and takes the bug out again."""
    path = bug.place(copy.folder)
    clean = path.read_text(encoding="utf-8")
    path.write_text(clean.replace(bug.old, bug.new), encoding="utf-8")
    try:
        return row_of(bug, copy.build(bug.kind), catch(copy, bug, until, hang))
    finally:
        path.write_text(clean, encoding="utf-8")


def in_turns(bugs: Sequence[Bug]) -> list[Bug]:
    """The first bug of every room, then the second ones and so on: a run that is cut short has seen all rooms."""
    seen: Counter[str] = Counter()
    turns = {}
    for bug in bugs:
        turns[bug.name] = seen[bug.room]
        seen[bug.room] += 1
    return sorted(bugs, key=lambda bug: turns[bug.name])


def row_of(bug: Bug, build: float, found: Outcome) -> dict[str, Any]:
    return {
        "name": bug.name,
        "kind": bug.kind,
        "room": bug.room,
        "caught_by": found.caught_by,
        "how": found.how,
        "stage": found.stage,
        "marks": found.marks,
        "passed": found.passed,
        "tests": found.tests,
        "test_seconds": round(found.test_seconds, 2),
        "wall_seconds": round(found.wall_seconds, 1),
        "build_seconds": round(build, 1),
    }


def control(copy: Copy, rows: Iterable[dict[str, Any]], kind: str, hang: float) -> int:
    """Runs on the clean copy all tests that caught a bug of a kind; returns how many these are.

    Raises RuntimeError if one of them fails there too.
    """
    catchers = {row["caught_by"] for row in rows if row["kind"] == kind and row["caught_by"]} - {UNNAMED}
    if not catchers:
        return 0
    copy.build(kind)
    found = copy.test(sorted(catchers), "", hang)
    if found.caught_by:
        raise RuntimeError(f"the clean copy fails {found.caught_by} too ({found.how})")
    return found.tests


def missed_since(before: Path, rows: Iterable[dict[str, Any]]) -> list[str]:
    """The bugs that a record has as caught, and these rows as missed."""
    known = {row["name"] for row in json.loads(before.read_text(encoding="utf-8"))["planted_bugs"] if row["caught_by"]}
    return [row["name"] for row in rows if row["name"] in known and row["caught_by"] is None]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """One line a bug, the missed ones first, and a line of counts."""
    rows = sorted(rows, key=lambda row: (row["caught_by"] is not None, row["kind"], row["name"]))
    lines = [f"{'bug':44} {'room':20} {'test s':>7} {'wall s':>7}  caught by"]
    for row in rows:
        by = "nothing" if row["caught_by"] is None else f"{row['caught_by']} ({row['how']}, {row['stage']})"
        lines.append(f"{row['name']:44} {row['room']:20} {row['test_seconds']:7.1f} {row['wall_seconds']:7.0f}  {by}")
    return "\n".join([*lines, f"{sum(row['caught_by'] is not None for row in rows)} of {len(rows)} bugs are caught"])


def read(out: Path) -> dict[str, dict[str, Any]]:
    """The rows of a record, by the bugs' names; none where there is no file."""
    rows = json.loads(out.read_text(encoding="utf-8"))["planted_bugs"] if out.exists() else []
    return {row["name"]: row for row in rows}


def write(out: Path, rows: dict[str, dict[str, Any]], **about: Any) -> None:
    """Writes a record with a line for each bug."""
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in about.items())
    lines = ",\n".join(json.dumps(row) for row in rows.values())
    out.write_text(f'{{\n{head}"planted_bugs": [\n{lines}\n]\n}}\n', encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON, a line for each bug; lines of other bugs stay")
    parser.add_argument("--bugs", nargs="*", default=[], metavar="NAME", help="only these")
    parser.add_argument("--kind", choices=MARKS, help="only bugs of this kind")
    parser.add_argument("--until", choices=STAGES, default="all", help="the last stage of tests")
    parser.add_argument("--tests", nargs="*", metavar="GLOB", help="run these files first instead of those of the bug")
    parser.add_argument("--hang", type=float, default=300, metavar="SECONDS", help="without a finished test")
    parser.add_argument("--before", type=Path, metavar="JSON", help="fail for bugs that this record has as caught")
    parser.add_argument("--again", action="store_true", help="also plant bugs that OUT has already")
    parser.add_argument("--lists", type=Path, default=LISTS, help="the folder of bugs")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "planted-bugs", help="the folder of the copy")
    options = parser.parse_args(arguments)

    bugs = [bug for bug in read_bugs(options.lists) if options.kind in (None, bug.kind)]
    if unknown := set(options.bugs) - {bug.name for bug in bugs}:
        parser.error(f"--bugs: {', '.join(sorted(unknown))}: expected names of {options.lists}")
    bugs = [bug for bug in bugs if not options.bugs or bug.name in options.bugs]
    if options.tests:
        bugs = [Bug(**{**bug.__dict__, "tests": tuple(options.tests)}) for bug in bugs]
    copy = Copy(options.work.resolve())
    for bug in bugs:
        bug.place(copy.folder), bug.test_files(copy.folder)
    rows, about = read(options.out), copy.about()
    for bug in in_turns([bug for bug in bugs if options.again or bug.name not in rows]):
        rows[bug.name] = row = plant(copy, bug, options.until, options.hang)
        write(options.out, rows, **about)
        print(f"{bug.name}: {row['caught_by'] or 'not caught'}", flush=True)
    for kind in dict.fromkeys(bug.kind for bug in bugs):
        print(f"the {control(copy, rows.values(), kind, options.hang)} tests that caught {kind} bugs pass without them")
    print(table(rows.values()))
    if options.before and (missed := missed_since(options.before, rows.values())):
        parser.exit(1, f"caught before, missed now: {', '.join(missed)}\n")


if __name__ == "__main__":
    main()
