"""Exact laws of a rule on enumerated trees."""

from tests.rules.drafting import Models, Shape, sampled
from tests.rules.exact_law import Enumerated, joint, total_variation

MODELS = [Models(3, 1), Models(3, 2, zeros=True), Models(4, 3), Models(5, 4)]
ROUNDING, WRONG = 1e-12, 0.01


def depth_of(shape: Shape) -> int:
    return max((1 + depth_of(below) for below in shape), default=0)


def distance(emitted: Enumerated, reference, length: int) -> float:
    """Computes the total variation between the first `length` emitted tokens and those of a reference."""
    return total_variation(emitted.law(reference, length), joint(reference, emitted.vocab, length))


def enumerated(core, spec, models: Models, shape: Shape, replacement: bool = False, **options) -> Enumerated:
    """The law for trees sampled from the draft distribution."""
    trees = sampled(models.draft, replacement, shape)
    return Enumerated(core, spec, models, trees, **{"draft": models.draft, "replacement": replacement, **options})
