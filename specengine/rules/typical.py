"""Medusa's typical acceptance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specengine.rules.base import Rule, check_number


@dataclass(frozen=True)
class Typical(Rule):
    """Follows the longest path of tokens with target_prob > min(epsilon, delta * exp(-entropy)) or drawn by the target.

    Lossy (Cai et al. 2024, section 3.3.2); probabilities are those after temperature and filters, so temperature 0 is
    exact. Neutral at epsilon = 1 with delta = 1e9, where only what the target draws is accepted: `match`.
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
