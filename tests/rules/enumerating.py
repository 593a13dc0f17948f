"""Exact laws of a rule on enumerated trees."""

from collections.abc import Iterator

from tests.rules.drafting import Drafted, Masked, Models, Shape, deterministic, sampled
from tests.rules.exact_law import Enumerated, joint, total_variation

MODELS = [Models(3, 1), Models(3, 2, zeros=True), Models(4, 3), Models(5, 4)]
MASKED = [Masked(3, 5), Masked(3, 6, zeros=True), Masked(4, 7, least=2), Masked(5, 8, least=2)]
ROUNDING, WRONG = 1e-12, 0.01


def depth_of(shape: Shape) -> int:
    return max((1 + depth_of(below) for below in shape), default=0)


def distance(emitted: Enumerated, reference, length: int) -> float:
    """Computes the total variation between the first `length` emitted tokens and those of a reference."""
    return total_variation(emitted.law(reference, length), joint(reference, emitted.vocab, length))


def drafted(models: Models, shape: Shape, replacement: bool = False) -> Iterator[Drafted]:
    """Lists the trees that are sampled from the draft distribution and cut by the masks, if there are any."""
    if not isinstance(models, Masked):
        return sampled(models.draft, replacement, shape)
    return (tree.cut(models.allowed) for tree in sampled(models.unmasked_draft, replacement, shape))


def chosen(models: Models, shape: Shape) -> Drafted:
    """Makes the tree of the drafter's most likely tokens, cut by the masks, if there are any."""
    if not isinstance(models, Masked):
        return deterministic(models.draft, shape)
    return deterministic(models.unmasked_draft, shape).cut(models.allowed)


def enumerated(core, spec, models: Models, shape: Shape, replacement: bool = False, **options) -> Enumerated:
    """The law for trees sampled from the draft distribution; masks then cut them."""
    trees = drafted(models, shape, replacement)
    return Enumerated(core, spec, models, trees, **{"draft": models.draft, "replacement": replacement, **options})
