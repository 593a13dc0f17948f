"""The interface of a verification rule."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar


class Wants(Enum):
    """The knowledge of the draft distribution of a node's children that a rule needs."""

    NOTHING = "nothing"
    """It needs none: it can verify any tree."""

    SAMPLES = "samples"
    """Children sampled from a distribution that the drafter hands over. Deterministic children need no distribution."""

    SAMPLED_ONLY = "sampled only"
    """As SAMPLES; deterministic children are refused."""

    PROBABILITIES = "probabilities"
    """Children chosen in any way, for example greedily; the drafter hands over its logits."""


@dataclass(frozen=True)
class Rule(ABC):
    """Decides which drafted tokens are accepted; csrc/rules holds the arithmetic.

    name: as in specs and results.  lossless: whether the output has the target's distribution.
    wants: its needs of the draft distribution.  positional: the option that a spec may give without its name, as in
    `cascade:opt`.  chains_only: whether trees with siblings are refused.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    wants: ClassVar[Wants] = Wants.NOTHING
    positional: ClassVar[str | None] = None
    chains_only: ClassVar[bool] = False

    @property
    def kernel(self) -> str:
        """The name of its functor in csrc/rules/rules.h."""
        return self.name

    @property
    def options(self) -> tuple[float, ...]:
        """The numbers that the kernel reads; by default the parameters."""
        return tuple(vars(self).values())

    @property
    @abstractmethod
    def neutral(self) -> Rule | None:
        """The rule with the parameters at which it equals the exact rule bit for bit; None where no parameters do."""

    @property
    def reads_logits(self) -> bool:
        """Whether it reads more than the most likely token of every node at temperature 0."""
        return True


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raises ValueError unless the value is a number from low to high."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
