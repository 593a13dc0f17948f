"""MARS: where the target's two best tokens are close, either will do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specengine.rules.base import Rule, Wants, check_choice, check_number

MODES = ("strict", "lossless-base", "reference")


@dataclass(frozen=True)
class Margin(Rule):
    """Accepts the target's runner-up where z2 / z1 > theta, for its two largest scores before temperature and filters.

    Lossy. The ratio counts only where both scores are positive.
    mode `strict`: the paper's Algorithm 1, the best token or a close runner-up, else the best; it never samples, so its
    neutral theta = 1 is greedy decoding: `match` at temperature 0.
    mode `lossless-base`: margin acceptance, else `match`; neutral at theta = 1.
    mode `reference`: what the public implementation does. Temperature 0 has no margin there; above it the ratio is of
    filtered scores of any sign, and children beyond the margin are accepted with min(1, target_prob / draft_prob)
    although they were not drawn from the draft distribution. No theta makes that exact: it has no neutral parameter.
    """

    theta: float = 0.9
    mode: str = "strict"

    name: ClassVar[str] = "margin"
    positional: ClassVar[str] = "mode"

    def __post_init__(self) -> None:
        check_number("theta", self.theta, 0, 1)
        check_choice("mode", self.mode, MODES)

    @property
    def wants(self) -> Wants:  # type: ignore[override]  # the mode decides
        return Wants.PROBABILITIES if self.mode == "reference" else Wants.NOTHING

    @property
    def kernel(self) -> str:
        return f"margin_{self.mode.replace('-', '_')}"

    @property
    def options(self) -> tuple[float, ...]:
        return (self.theta,)

    @property
    def neutral(self) -> Rule | None:
        return None if self.mode == "reference" else Margin(1.0, self.mode)
