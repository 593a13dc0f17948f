"""Cycles of the engine beside their goals, as modelled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from specengine.bench.gpu_model.constants import Gpu
from specengine.bench.gpu_model.counts import BATCH, ROWS
from specengine.bench.gpu_model.passes import Step, eagle_chain, one_pass_drafter, target_pass, total, verification

CHAIN = 7


@dataclass(frozen=True)
class Cycle:
    """Holds the steps of a cycle.  rows: of its pass, of all requests."""

    name: str
    rows: int
    batch: int
    steps: list[Step]

    @property
    def ms(self) -> float:
        """Milliseconds of the cycle."""
        return total(self.steps) / 1e3

    @property
    def launches(self) -> int:
        """Kernels that the cycle starts."""
        return sum(step.launches for step in self.steps)


@dataclass(frozen=True)
class Goal:
    """Holds a goal and the modelled value.  at_least: whether the goal is a least value; else it is a largest value."""

    name: str
    modelled: float
    goal: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the modelled value reaches the goal."""
        return self.modelled >= self.goal if self.at_least else self.modelled <= self.goal


def verified(gpu: Gpu, rows: int, batch: int = 1, drafter: Callable[[Gpu], list[Step]] | None = None) -> list[Step]:
    """Returns the steps of a cycle: drafting, the pass, verification."""
    drafted = drafter(gpu) if drafter else []
    return [*drafted, *target_pass(gpu, rows, batch), *verification(gpu, rows, batch)]


def cycles(gpu: Gpu) -> list[Cycle]:
    """Models every cycle of the table."""
    return [
        *(Cycle(f"{rows} rows" if rows > 1 else "plain", rows, 1, verified(gpu, rows)) for rows in ROWS),
        Cycle(f"plain, batch {BATCH}", BATCH, BATCH, verified(gpu, BATCH, BATCH)),
        Cycle("EAGLE-3, chain of 7", CHAIN + 1, 1, verified(gpu, CHAIN + 1, 1, lambda g: eagle_chain(g, CHAIN))),
        Cycle("128 rows, drafter of one pass", ROWS[-1], 1, verified(gpu, ROWS[-1], 1, one_pass_drafter)),
    ]


def goals(gpu: Gpu, found: list[Cycle]) -> list[Goal]:
    """Compares modelled cycles with the goals, which hold for one H200, bfloat16, batch 1 and about 2,000 tokens."""
    ms = {cycle.name: cycle.ms for cycle in found}
    one, sixty = (total(target_pass(gpu, rows, 1)) for rows in (1, 60))
    return [
        Goal("plain decoding", 1e3 / ms["plain"], 270, "tokens/s", at_least=True),
        Goal("pass of 60 nodes over pass of one", sixty / one, 1.05, "x"),
        Goal("cycle of a chain of 7, EAGLE-3", ms["EAGLE-3, chain of 7"], 5.2, "ms"),
        Goal("cycle of 128 nodes, drafter of 1 B in one pass", ms["128 rows, drafter of one pass"], 5.0, "ms"),
    ]
