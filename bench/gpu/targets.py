"""The goals of a GPU, and what the results of each step say of them.

The goals hold for one H200 with the shapes of Llama-3.1-8B in bfloat16, batch 1, about 2,000 tokens of context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

Results = dict[str, Any]
BENT = "bend"  # a phase that only synthetic drafters have
ROWS = 60  # of the pass that is compared with a pass of one row


@dataclass(frozen=True)
class Target:
    """Holds a measured value, None if it was not measured, and its goal, None without one.

    at_least: whether the goal is a least value; else it is a largest value.
    """

    name: str
    value: float | None
    goal: float | None
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the goal is reached; None without a goal or a value."""
        if self.value is None or self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def line(self) -> str:
        """Returns name, value, goal and whether it is met, as a line."""
        value = "not measured" if self.value is None else f"{self.value:.4g} {self.unit}"
        goal = verdict = ""
        if self.goal is not None:
            goal = f"goal at {'least' if self.at_least else 'most'} {self.goal:g} {self.unit}"
            verdict = "" if self.met is None else "yes" if self.met else "NO"
        return f"{self.name + ':':52} {value:16} {goal:28} {verdict}".rstrip()

    def entry(self) -> dict[str, Any]:
        """Returns the fields and `met`, for JSON."""
        return {**asdict(self), "met": self.met}


Reading = Callable[[Results], Iterator[Target]]


def listed(results: Results) -> Iterator[Target]:
    """Yields what a step itself says that it measured: `measured`, a list of names, values and units."""
    for name, value, unit in results.get("measured", ()):
        yield Target(name, value, None, unit)


def plain(results: Results) -> Iterator[Target]:
    """Yields the goals of plain decoding."""
    row = _row(results, "none")
    yield Target("plain decoding", _speed(row), 270, "tokens/s", at_least=True)
    yield Target("plain decoding, a cycle", _cycle(row), 3.7, "ms")
    yield Target("plain decoding, host between two cycles", _share(row, "host"), 1, "%")


def passes(results: Results) -> Iterator[Target]:
    """Yields the goals of a pass by its rows."""
    rows = {row["rows"]: row for row in results.get("rows", ())}
    ratio = rows[ROWS]["ratio"] if ROWS in rows else None
    yield Target(f"pass of {ROWS} nodes over pass of one", ratio, 1.05, "x")
    for count, row in rows.items():
        yield Target(f"pass of {count}", row["ms"], None, "ms")


def prompts(results: Results) -> Iterator[Target]:
    """Yields the goal of the host in a pass over a prompt, and the times of attention by both ways."""
    yield Target("pass over a prompt, the host's calls", results.get("host_ms"), 1, "ms")
    yield from listed(results)


def cycle_of(name: str, ends: str, goal: float | None) -> Reading:
    """Returns the reading of the cycle of the drafter whose description ends so."""

    def read(results: Results) -> Iterator[Target]:
        row = _row(results, ends)
        yield Target(f"cycle, {name}", _cycle(row), goal, "ms")
        yield Target(f"{name}: verification, compaction, expansion", _share(row, "accept", "compact", "expand"), 3, "%")
        yield Target(f"{name}: host between two cycles", _share(row, "host"), 1, "%")

    return read


def both(*readings: Reading) -> Reading:
    """Returns the reading that yields the targets of all."""
    return lambda results: (target for read in readings for target in read(results))


def without_goals(reading: Reading, what: str) -> Reading:
    """Returns the reading of a run that is only compared: `what` stands behind the names, and there are no goals."""
    return lambda results: (replace(each, name=f"{each.name}, {what}", goal=None) for each in reading(results))


def batch(results: Results) -> Iterator[Target]:
    """Yields the goal of plain decoding in a batch."""
    row = _row(results, "none")
    yield Target("cycle, batch 64, plain", _cycle(row), 7.8, "ms")
    yield Target("batch 64, plain, all requests", _speed(row), None, "tokens/s", at_least=True)


def fallback(results: Results) -> Iterator[Target]:
    """Yields the speed of the last drafter over plain decoding's: random drafts fail, so it should draft no more."""
    rows = results.get("runs", ())
    plain, drafted = (_speed(rows[0]), _speed(rows[-1])) if len(rows) > 1 else (None, None)
    ratio = drafted / plain if plain and drafted else None
    yield Target("a drafter whose drafts fail, over plain decoding", ratio, None, "x", at_least=True)


def kernels(results: Results) -> Iterator[Target]:
    """Yields the mean speed of each kernel as a share of the memory's, and how many cases are faster than PyTorch's."""
    shares: dict[str, list[float]] = {}
    for row in results.get("kernels", ()):
        shares.setdefault(row["kernel"], []).append(100 * row["bandwidth_fraction"])
    for kernel, each in shares.items():
        yield Target(f"{kernel}: mean share of memory's speed", sum(each) / len(each), None, "%", at_least=True)
    faster = [row["speedup"] > 1 for row in results.get("kernels", ())]
    share = 100 * sum(faster) / len(faster) if faster else None
    yield Target("cases faster than PyTorch", share, 100, "%", at_least=True)


def peers(results: Results) -> Iterator[Target]:
    """Yields our speed over each peer's, both of plain decoding."""
    ours = _row(results, "none")
    for row in results.get("runs", ()):
        if row["peer"] and ours:
            name = f"plain decoding over {row['peer']}"
            yield Target(name, row["seconds"] / row["tokens"] * ours["tokens"] / ours["seconds"], 1, "x", at_least=True)


def _row(run: Results, ends: str) -> Results | None:
    rows = (row for row in run.get("runs", ()) if row["peer"] is None)
    return next((row for row in rows if row["drafter"].endswith(ends)), None)


def _speed(row: Results | None) -> float | None:
    return row["tokens"] / (row["seconds"] - row["prefill_seconds"]) if row else None


def _cycle(row: Results | None) -> float | None:
    return sum(ms for phase, ms in row["ms_per_cycle"].items() if phase != BENT) if row else None


def _share(row: Results | None, *phases: str) -> float | None:
    cycle = _cycle(row)
    if row is None or not cycle or not all(phase in row["ms_per_cycle"] for phase in phases):
        return None
    return 100 * sum(row["ms_per_cycle"][phase] for phase in phases) / cycle
