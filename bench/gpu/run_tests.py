"""Runs tests and counts them: python bench/gpu/run_tests.py JSON OPTION...

The options are pytest's. A run in which no test passed is a failure: skipped tests check nothing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest


class Outcomes:
    """Counts what became of the tests of a run, as a plugin of pytest."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter(passed=0, skipped=0, failed=0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test by its call, or by the part that skipped it or failed."""
        if report.when == "call" or not report.passed:
            self.found[report.outcome] += 1


def main(path: Path, options: list[str]) -> int:
    outcomes = Outcomes()
    code = int(pytest.main(options, plugins=[outcomes]))
    measured = [[f"tests {outcome}", count, ""] for outcome, count in outcomes.found.items()]
    path.write_text(json.dumps({"measured": measured}), encoding="utf-8")
    if not outcomes.found["passed"]:
        print("no test passed, so nothing was checked", flush=True)
    return code or (0 if outcomes.found["passed"] else 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
