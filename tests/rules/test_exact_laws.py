"""Every rule's law against its definition, exactly: no sampling, so 1e-12 tells right from wrong."""

from functools import partial
from types import ModuleType

import numpy as np
import pytest

from specengine.rules import RULES
from specengine.rules.cascade import ALPHAS
from tests.rules.drafting import CHAINS, TREES, Conditional, Models, Path, Shape, deterministic, sampled
from tests.rules.exact_law import Enumerated, joint, total_variation

pytestmark = pytest.mark.sim

MODELS = [Models(3, 1), Models(3, 2, zeros=True), Models(4, 3), Models(5, 4)]
LOSSLESS_ON_CHAINS = [name for name, rule in RULES.items() if rule.lossless]
LOSSLESS_ON_TREES = [name for name in LOSSLESS_ON_CHAINS if name != "block"]
CASCADES = ["cascade:chow,alpha=0.4", "cascade:diff,alpha=0.1", "cascade:opt,alpha=0.3", "cascade:token-v1,alpha=0.4"]
CASCADES += ["cascade:token-v2,alpha=0.3", "cascade:token-v3,alpha=0.5", "bild:alpha=1"]
EVEN_TREES = {"chain": CHAINS[3], "siblings": ((), (), ()), "two levels": (((), ()), ((),))}
ROUNDING, WRONG = 1e-12, 0.01


def depth_of(shape: Shape) -> int:
    return max((1 + depth_of(below) for below in shape), default=0)


def few_trees(models: Models, shape: Shape) -> bool:
    """Whether all trees can be enumerated within a second or two."""
    nodes = sum(1 for _ in np.ravel(str(shape)) for c in str(shape) if c == "(") - 1
    return models.vocab**nodes <= 1100


def distance(core: ModuleType, spec: str, models: Models, shape: Shape, replacement: bool, **broken) -> float:
    """Total variation between what is emitted and the target's law; siblings are sampled."""
    trees = sampled(models.draft, replacement, shape)
    options = {"draft": models.draft, "replacement": replacement, **broken}
    return distance_to(models.target, Enumerated(core, spec, models, trees, **options), depth_of(shape) + 1)


def distance_to(reference: Conditional, emitted: Enumerated, length: int) -> float:
    return total_variation(emitted.law(reference, length), joint(reference, emitted.vocab, length))
