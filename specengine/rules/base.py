"""What every rule has in common."""

from __future__ import annotations

from enum import Enum


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
