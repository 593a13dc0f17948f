"""Results of one contender at one temperature and batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from specengine.bench.race.run_stats import RunStats
from specengine.types import GenerationOutput

AnswerKey = tuple[int, int, int]  # number of the group, place in the group, turn


@dataclass
class Run:
    """Holds the repetitions of one contender, and its answers.

    identical: per answer, whether every repetition equals the answer of plain decoding.
    peer: mode of another engine; None for specengine.
    device_seconds: median seconds of each phase of a cycle, measured in one more repetition; None off the device.
    answers: of the first repetition.
    peak_memory: bytes; None where it was not measured.
    expert_passes: of a mixture of experts, as expert_passes() returns them.
    """

    drafter: str
    batch: int
    repetitions: list[RunStats] = field(default_factory=list)
    identical: dict[AnswerKey, bool] = field(default_factory=dict)
    peer: str | None = None
    device_seconds: dict[str, float] | None = None
    rule: str = "match"
    answers: dict[AnswerKey, GenerationOutput] = field(default_factory=dict)
    temperature: float = 0.0
    peak_memory: int | None = None
    expert_passes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def median(self) -> RunStats:
        """The repetition of median time; of an even number, the lower of the middle two."""
        return _median(self.repetitions)

    @property
    def median_by_class(self) -> dict[str, RunStats]:
        """The repetition of median time of each class of questions."""
        classes = self.repetitions[0].by_class
        return {name: _median([stats.by_class[name] for stats in self.repetitions]) for name in classes}


def _median(repetitions: Sequence[RunStats]) -> RunStats:
    seconds = median_low(stats.seconds for stats in repetitions)
    return next(stats for stats in repetitions if stats.seconds == seconds)
