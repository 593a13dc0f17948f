"""Cycles of the engine beside their goals, as modelled."""

from __future__ import annotations

from dataclasses import dataclass

from specengine.bench.gpu_model.constants import Gpu
from specengine.bench.gpu_model.counts import BATCH, CHAIN, NODES
from specengine.bench.gpu_model.passes import (
    Step,
    eagle_chain,
    lookup,
    one_pass_drafter,
    target_pass,
    total,
    verification,
)


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


def verified(gpu: Gpu, nodes: int, batch: int = 1, library: bool = True, chains: bool = False) -> list[Step]:
    """Returns the steps of a pass and of verification.  Arguments: see `layers`.  chains: paths lie in place."""
    drafted = lookup(gpu, batch) if nodes == 1 else []
    return [*drafted, *target_pass(gpu, nodes, batch, library), *verification(gpu, nodes, batch, chains)]


def cycles(gpu: Gpu) -> list[Cycle]:
    """Models every cycle of the table."""
    trees = [
        Cycle(_name(nodes, batch), nodes * batch, batch, verified(gpu, nodes, batch))
        for batch in (1, BATCH)
        for nodes in NODES
    ]
    chain, large, most = CHAIN + 1, *NODES[-2:]
    return [
        *trees,
        Cycle(f"{large} rows, without cuBLAS", large, 1, verified(gpu, large, library=False)),
        Cycle(f"EAGLE-3, chain of {CHAIN}", chain, 1, [*eagle_chain(gpu), *verified(gpu, chain, chains=True)]),
        Cycle(f"{most} rows, drafter of one pass", most, 1, [*one_pass_drafter(gpu), *verified(gpu, most)]),
    ]


def _name(nodes: int, batch: int) -> str:
    name = "plain" if nodes == 1 else f"{nodes} rows"
    return name if batch == 1 else f"batch {batch}, {name}" + (" each" if nodes > 1 else "")


def goals(gpu: Gpu, found: list[Cycle]) -> list[Goal]:
    """Compares modelled cycles with the goals, which hold for one H200, bfloat16, batch 1 and about 2,000 tokens."""
    ms = {cycle.name: cycle.ms for cycle in found}
    one, sixty = (total(target_pass(gpu, nodes)) for nodes in (1, 60))
    return [
        Goal("plain decoding", 1e3 / ms["plain"], 270, "tokens/s", at_least=True),
        Goal("pass of 60 nodes over pass of one", sixty / one, 1.05, "x"),
        Goal("cycle of a chain of 7, EAGLE-3", ms["EAGLE-3, chain of 7"], 5.2, "ms"),
        Goal("cycle of 128 nodes, drafter of 1 B in one pass", ms["128 rows, drafter of one pass"], 5.0, "ms"),
    ]
