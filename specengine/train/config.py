"""The options of a training run that all drafters share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specengine.rules.base import check_number
from specengine.utils.spec_string import check_range

SCHEDULES = ("cosine", "linear")
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class TrainConfig:
    """The options of a training run.

    epochs: 0 only evaluates the first weights and writes them.  learning_rate: None takes the drafter's own.
    batch_tokens: tokens to learn per step.  rows: rows of a pass, padding included.
    warmup: share of the steps in which the rate rises; then it falls to zero by `schedule`.
    clip: the largest gradient norm; 0 for none.  minutes: time limit of a run, which can be resumed; 0 for none.
    held_out: dialogues to evaluate on.  evaluate_steps, save_steps: steps between evaluations and checkpoints.
    precision: auto means bfloat16 autocast on CUDA, float32 on the CPU.
    Raises ValueError naming the option.
    """

    epochs: int = 1
    learning_rate: float | None = None
    batch_tokens: int = 2048
    rows: int = 2048
    schedule: str = "cosine"
    warmup: float = 0.03
    clip: float = 0.5
    weight_decay: float = 0.0
    seed: int = 0
    minutes: float = 0.0
    held_out: int = 64
    evaluate_steps: int = 100
    save_steps: int = 100
    precision: str = "auto"

    def __post_init__(self) -> None:
        check_range("epochs", self.epochs, 0, 1 << 24)
        for name in ("batch_tokens", "rows", "held_out", "evaluate_steps", "save_steps"):
            check_range(name, getattr(self, name), 1, 1 << 24)
        check_range("seed", self.seed, 0, 1 << 40)
        for name in ("clip", "weight_decay", "minutes"):
            check_number(name, getattr(self, name), 0, 1e9)
        check_number("warmup", self.warmup, 0, 1)
        if self.learning_rate is not None:
            check_number("learning_rate", self.learning_rate, 0, 10)
        for name, known in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected {' or '.join(known)}, got {getattr(self, name)!r}")

    def rate(self, step: int, steps: int) -> float:
        """Returns the factor on the learning rate at a step from 0 to steps - 1."""
        warm = self.warmup * steps
        if step < warm:
            return (step + 1) / (warm + 1)
        done = (step - warm) / max(1.0, steps - warm)
        return 1 - done if self.schedule == "linear" else 0.5 + 0.5 * math.cos(math.pi * done)
