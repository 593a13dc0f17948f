"""Compares the results of bench/gpu.sh with the goals: python bench/gpu_targets.py FOLDER

The goals hold for one H200 with the shapes of Llama-3.1-8B in bfloat16, batch 1, about 1,000 tokens of context.
Prints a line per goal, measured or not, and writes gpu-targets.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BENT = "bend"  # a phase that only synthetic drafters have


@dataclass(frozen=True)
class Target:
    """Holds a goal and its measured value, None if it was not measured.

    at_least: whether the goal is a least value; else it is a largest value.
    """

    name: str
    value: float | None
    goal: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal


def targets(cycles: dict[str, Any], sampled: dict[str, Any]) -> Iterator[Target]:
    """Yields the goals, from the results of the steps `cycles` and `sampled`, which may be empty."""
    plain = _row(cycles, "none")
    speed = plain and plain["tokens"] / (plain["seconds"] - plain["prefill_seconds"])
    yield Target("plain decoding", speed, 255, "tokens/s", at_least=True)
    passes = {row["rows"]: row["ratio"] for row in cycles.get("rows", ())}
    yield Target("pass of 60 nodes over pass of one", passes.get(60), 1.08, "x")
    chain = _row(cycles, "cost=eagle3", without="k=")
    yield Target("cycle of a chain of 7, EAGLE-3's cost", _cycle(chain), 5.7, "ms")
    for cost in ("fasteagle", "eagle3"):
        tree = _row(cycles, f"k=10,cost={cost}")
        yield Target(f"cycle of a tree of 61 nodes, {cost}'s cost", _cycle(tree), 6.3, "ms")
    for name, run in (("greedy", cycles), ("sampled", sampled)):
        tree = _row(run, "k=10,cost=fasteagle")
        yield Target(
            f"verification, compaction, expansion, {name}", _share(tree, "accept", "compact", "expand"), 3, "%"
        )
    for kind, row in (("plain", plain), ("chain", chain), ("tree", _row(cycles, "k=10,cost=fasteagle"))):
        yield Target(f"host between two cycles, {kind}", _share(row, "host"), 1, "%")


def _row(run: dict[str, Any], ends: str, without: str = "==") -> dict[str, Any] | None:
    rows = (row for row in run.get("runs", ()) if row["peer"] is None)
    return next((row for row in rows if row["drafter"].endswith(ends) and without not in row["drafter"]), None)


def _cycle(row: dict[str, Any] | None) -> float | None:
    return row and sum(ms for phase, ms in row["ms_per_cycle"].items() if phase != BENT)


def _share(row: dict[str, Any] | None, *phases: str) -> float | None:
    if row is None or not all(phase in row["ms_per_cycle"] for phase in phases):
        return None
    return 100 * sum(row["ms_per_cycle"][phase] for phase in phases) / _cycle(row)


def _read(path: Path) -> dict[str, Any]:
    """Reads the results of a run on a GPU; returns nothing without such a run."""
    run = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return run if run.get("device", "").startswith("cuda") else {}


def main(folder: Path) -> None:
    found = list(targets(_read(folder / "gpu-cycles.json"), _read(folder / "gpu-sampled.json")))
    for target in found:
        value = "not measured" if target.value is None else f"{target.value:.4g} {target.unit}"
        goal = f"goal {'at least' if target.at_least else 'at most'} {target.goal:g} {target.unit}"
        print(
            f"{target.name + ':':52} {value:16} {goal:28} {'' if target.met is None else 'yes' if target.met else 'NO'}"
        )
    text = json.dumps([{**asdict(target), "met": target.met} for target in found], indent=2)
    (folder / "gpu-targets.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
