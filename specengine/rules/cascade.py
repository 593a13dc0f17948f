"""Speculative cascades, and the lossy baselines to compare them with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from specengine.rules.base import Rule, Wants, check_choice, check_number

# Deferral rule -> the least and the largest alpha; the least one always defers to the target.
ALPHAS = {
    "chow": (-1.0, 1.0),
    "diff": (-2.0, 1.0),
    "opt": (-1e9, 1e9),
    "token-v1": (-2.0, 1.0),
    "token-v2": (-2.0, 1.0),
    "token-v3": (-1.0, 1.0),
}


@dataclass(frozen=True)
class Cascade(Rule):
    """Samples speculatively from a mixture pi of target and draft distribution (Narasimhan et al., arXiv 2405.19261).

    Lossy: the output has the distribution pi. q and p are the draft's and the target's largest probability without
    temperature and filters. Three rules keep the whole draft distribution where
      chow: q >= 1 - alpha;  diff: q >= p - alpha;  opt: q >= p - alpha * D_TV(target, draft).
    Three rules keep the tokens with
      token-v1: draft_prob >= p - alpha;  token-v2: target_prob >= p - alpha;  token-v3: target_prob >= (1 - alpha) * p
    and give the rest of the draft's mass to the target's distribution. D_TV and the mixture use the distributions after
    temperature and filters. The bonus token after the last drafted token is the target's.
    Neutral at the least alpha of each: -1 (chow, token-v3), -2 (diff, token-v1, token-v2), -1e9 (opt).
    """

    deferral: str = "token-v3"
    alpha: float = 0.5

    name: ClassVar[str] = "cascade"
    wants: ClassVar[Wants] = Wants.SAMPLED_ONLY
    positional: ClassVar[str] = "deferral"

    def __post_init__(self) -> None:
        check_choice("deferral", self.deferral, tuple(ALPHAS))
        check_number("alpha", self.alpha, *ALPHAS[self.deferral])

    @property
    def kernel(self) -> str:
        return self.deferral.replace("-", "_")

    @property
    def options(self) -> tuple[float, ...]:
        return (self.alpha,)

    @property
    def neutral(self) -> Rule:
        return Cascade(self.deferral, ALPHAS[self.deferral][0])


@dataclass(frozen=True)
class Bild(Rule):
    """Applies BiLD's rollback criterion as a deferral rule (Kim et al. 2023).

    It keeps the draft distribution where the target's cross-entropy of the drafter's best token is at most alpha. That
    is -log(target_prob), without temperature and filters.
    Lossy. Neutral at alpha = -1, because every cross-entropy is larger.
    """

    alpha: float = 1.0

    name: ClassVar[str] = "bild"
    wants: ClassVar[Wants] = Wants.SAMPLED_ONLY

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, -1, 100)

    @property
    def options(self) -> tuple[float, ...]:
        return (math.exp(-self.alpha),)

    @property
    def neutral(self) -> Rule:
        return Bild(-1.0)


@dataclass(frozen=True)
class Lossy(Rule):
    """Applies lenient speculative sampling (Leviathan et al. 2023, appendix A.5; beta: Tran-Thien 2023).

    It accepts with probability min(1, target_prob / ((1 - alpha) * draft_prob)). The residual is
    norm(max(target_prob / beta - draft_prob, 0)).
    Lossy. Neutral at alpha = 0 with beta = 1; alpha = 1 accepts everything.
    """

    alpha: float = 0.2
    beta: float = 1.0

    name: ClassVar[str] = "lossy"
    wants: ClassVar[Wants] = Wants.SAMPLED_ONLY

    def __post_init__(self) -> None:
        check_number("alpha", self.alpha, 0, 1)
        check_number("beta", self.beta, max(0.0, 1 - self.alpha - 1e-9), 1)  # 1 - 0.95 is a little more than 0.05
        if self.beta == 0:
            raise ValueError("beta: expected a number above 0, got 0")

    @property
    def options(self) -> tuple[float, ...]:
        return (1 - self.alpha, 1 / self.beta)

    @property
    def neutral(self) -> Rule:
        return Lossy(0.0, 1.0)
