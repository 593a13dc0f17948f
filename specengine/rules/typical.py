"""Typical acceptance, the rule of Medusa."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specengine.rules.base import Rule, check_number


@dataclass(frozen=True)
class Typical(Rule):
    """Follows the longest path of accepted tokens (Cai et al. 2024, section 3.3.2).

    It accepts tokens with target_prob > min(epsilon, delta * exp(-entropy)), and tokens that the target draws.
    Lossy. Probabilities are taken after temperature and filters, so temperature 0 is exact.
    Neutral at epsilon = 1 with delta = 1e9: then it accepts only tokens that the target draws, as `match`.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    name: ClassVar[str] = "typical"

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, 0, 1)
        check_number("delta", self.delta, 0, 1e9)

    @property
    def neutral(self) -> Rule:
        return Typical(1.0, 1e9)
