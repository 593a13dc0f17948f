"""Factors that some families have in a pass: a configuration names them, a decoder applies them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Multipliers:
    """Factors of a pass, which Granite's models have; PLAIN are those of all others.

    embedding: of the rows that enter the first layer.  attention: of scores before their softmax; None: 1 /
    sqrt(head_dim).  residual: of what a block adds to the residual stream.  logits_divisor: of logits.
    A pass keeps the residual stream divided by `residual`: blocks then add to it what they compute, and its RMSNorm is
    the same with eps / residual^2.
    Raises ValueError for a factor that is not a positive number.
    """

    embedding: float = 1.0
    attention: float | None = None
    residual: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("embedding", "attention", "residual", "logits_divisor"):
            value = getattr(self, name)
            if not (name == "attention" and value is None) and not 0 < value < float("inf"):
                raise ValueError(f"multipliers: {name} must be positive and finite, got {value}")

    def attention_scale(self, head_dim: int) -> float:
        """Returns the factor of the scores of heads of this size."""
        return float(head_dim**-0.5) if self.attention is None else self.attention


PLAIN = Multipliers()
