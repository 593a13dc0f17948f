"""MARS: accepts either of the target's two best tokens where their scores are close."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from specengine.rules.base import Rule, Wants, check_choice, check_number

MODES = ("strict", "lossless-base", "reference")


@dataclass(frozen=True)
class Margin(Rule):
    """Accepts the target's runner-up where z2 / z1 > theta, for its two largest scores before temperature and filters.

    Lossy. The ratio counts only where both scores are positive.
    mode `strict`: the paper's Algorithm 1. It accepts the best token or a close runner-up, else emits the best one. It
    never samples: at its neutral theta = 1 it is greedy decoding, `match` at temperature 0.
    mode `lossless-base`: margin acceptance, else `match`; neutral at theta = 1.
    mode `reference`: the public implementation. It has no margin at temperature 0. Above, it uses the ratio of filtered
    scores of any sign, and accepts children beyond the margin with min(1, target_prob / draft_prob) although they were
    not drawn from the draft distribution. No theta makes that exact, so it has no neutral parameter.
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
