"""What a rule is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass
from enum import Enum
from typing import ClassVar


class Wants(Enum):
    """What a rule wants to know of the draft distribution that a node's children come from."""

    NOTHING = "nothing"
    """Any tree will do."""

    SAMPLES = "samples"
    """Children sampled from a distribution that is handed over; deterministic children without one are served too."""

    SAMPLED_ONLY = "sampled only"
    """As SAMPLES, but deterministic children are refused."""

    PROBABILITIES = "probabilities"
    """Children may be chosen in any way, greedily for one; the draft's logits must be handed over."""


@dataclass(frozen=True)
class Rule(ABC):
    """How drafted tokens are accepted; the arithmetic is in csrc/rules.

    lossless: whether the output has the target's distribution.
    positional: the option whose name may be left out of a spec: `cascade:opt`.
    chains_only: whether a tree whose nodes have siblings is refused.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = False
    wants: ClassVar[Wants] = Wants.NOTHING
    positional: ClassVar[str | None] = None
    chains_only: ClassVar[bool] = False

    @property
    def kernel(self) -> str:
        """Its name in csrc/rules/rules.h."""
        return self.name

    @property
    def options(self) -> tuple[float, ...]:
        """The numbers that the kernel takes: the parameters, where a rule does not say otherwise."""
        return astuple(self)

    @property
    @abstractmethod
    def neutral(self) -> Rule | None:
        """The parameters at which it is the exact rule bit for bit; None: there are none."""

    @property
    def reads_logits(self) -> bool:
        """Whether the most likely token of every node is not enough at temperature 0."""
        return True


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raises ValueError for what is no number from low to high."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:
        raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, got {value!r}")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError for what is none of the choices."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
