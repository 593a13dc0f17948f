"""Every rule's law equals its definition to 1e-12: the laws are enumerated, not sampled."""

from functools import partial

import numpy as np
import pytest

from specengine.rules import RULES, parse_rule
from tests.rules.drafting import CHAINS, TREES, Models, Shape, deterministic, sampled
from tests.rules.enumerating import MASKED, MODELS, ROUNDING, WRONG, chosen, depth_of, distance, enumerated
from tests.rules.exact_law import Enumerated

pytestmark = pytest.mark.sim

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
BRANCHING = [name for name in LOSSLESS if name != "block"]
CASCADES = [
    "cascade:chow,alpha=0.4",
    "cascade:diff,alpha=0.1",
    "cascade:opt,alpha=0.3",
    "cascade:token-v1,alpha=0.3",
    "cascade:token-v2,alpha=0.3",
    "cascade:token-v3,alpha=0.5",
    "bild:alpha=1",
]


def size_of(shape: Shape) -> int:
    return sum(1 + size_of(below) for below in shape)


@pytest.mark.parametrize("depth", CHAINS)
@pytest.mark.parametrize("spec", LOSSLESS)
def test_a_lossless_rule_emits_the_targets_law_on_sampled_chains(simulated, spec, depth):
    for models in [*MODELS, *MASKED]:
        emitted = enumerated(simulated, spec, models, CHAINS[depth])
        assert distance(emitted, models.target, depth + 1) <= ROUNDING, models


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("spec", BRANCHING)
def test_a_lossless_rule_emits_the_targets_law_on_sampled_trees(simulated, spec, shape, replacement):
    shape = TREES[shape]
    for models in [*MODELS, *MASKED]:
        if models.vocab ** size_of(shape) <= 1100:  # more trees would take more than a second or two
            emitted = enumerated(simulated, spec, models, shape, replacement)
            assert distance(emitted, models.target, depth_of(shape) + 1) <= ROUNDING, models


@pytest.mark.parametrize("shape", [CHAINS[3], *TREES.values()])
@pytest.mark.parametrize("spec", LOSSLESS)
def test_a_lossless_rule_emits_the_targets_law_on_deterministic_proposals(simulated, spec, shape):
    if spec == "block" and shape != CHAINS[3]:
        return  # block refuses trees
    for models in [*MODELS, *MASKED]:
        emitted = Enumerated(simulated, spec, models, [chosen(models, shape)])
        assert distance(emitted, models.target, depth_of(shape) + 1) <= ROUNDING, models


def deferred_to(spec: str, models: Models, depth: int, path) -> np.ndarray:
    """Returns pi behind a path; behind the last drafted token it is the target's own distribution."""
    target, draft = models.target(path), models.draft(path)
    if len(path) == depth or not draft.size:
        return target
    rule = parse_rule(spec)
    kept = {
        "chow": lambda: draft.max() >= 1 - rule.alpha,
        "diff": lambda: draft.max() >= target.max() - rule.alpha,
        "opt": lambda: draft.max() >= target.max() - rule.alpha * np.maximum(0, draft - target).sum(),
        "bild": lambda: -np.log(max(target[draft.argmax()], 1e-300)) <= rule.alpha,
        "token-v1": lambda: draft >= target.max() - rule.alpha,
        "token-v2": lambda: target >= target.max() - rule.alpha,
        "token-v3": lambda: target >= (1 - rule.alpha) * target.max(),
    }[getattr(rule, "deferral", "bild")]()
    return draft * kept + target * (1 - (draft * kept).sum())


@pytest.mark.parametrize("shape", [CHAINS[3], TREES["siblings"], ((((),), ((), ())))])
@pytest.mark.parametrize("spec", CASCADES)
def test_a_cascade_emits_the_mixture_that_its_deferral_rule_defines(simulated, spec, shape):
    depth, from_target = depth_of(shape), []
    for models in [*MODELS, *MASKED]:
        if models.vocab ** size_of(shape) > 1100:
            continue
        mixture = partial(deferred_to, spec, models, depth)
        for replacement in (False, True):
            emitted = enumerated(simulated, spec, models, shape, replacement)
            assert distance(emitted, mixture, depth + 1) <= ROUNDING, models
        from_target.append(distance(emitted, models.target, depth + 1))
    assert max(from_target) > WRONG, "a mixture that is the target shows nothing"


@pytest.mark.parametrize("spec", ["rejection", "block", "traversal"])
def test_a_residual_that_is_not_updated_is_noticed(simulated, spec):
    for models in MODELS:
        emitted = enumerated(simulated, spec, models, CHAINS[2], residual_kept=True)
        assert distance(emitted, models.target, 3) > WRONG


@pytest.mark.parametrize("spec", CASCADES)
def test_a_cascades_residual_that_is_not_updated_is_noticed(simulated, spec):
    distances = []
    for models in MODELS:
        emitted = enumerated(simulated, spec, models, CHAINS[2], residual_kept=True)
        distances.append(distance(emitted, partial(deferred_to, spec, models, 2), 3))
    assert max(distances) > WRONG


@pytest.mark.parametrize("spec", ["rejection", "traversal", "cascade:token-v3,alpha=0.1"])
def test_a_sibling_that_is_not_removed_from_the_draft_distribution_is_noticed(simulated, spec):
    distances = []
    for models in [Models(4, seed) for seed in range(20)]:  # a residual of one token hides the error
        trees = sampled(models.draft, False, TREES["siblings"])
        emitted = Enumerated(simulated, spec, models, trees, draft=models.draft, replacement=True)
        reference = models.target if spec in LOSSLESS else partial(deferred_to, spec, models, 1)
        distances.append(distance(emitted, reference, 2))
    assert max(distances) > WRONG


@pytest.mark.parametrize("spec", ["rejection", "traversal"])
def test_a_refused_deterministic_proposal_that_is_not_removed_is_noticed(simulated, spec):
    models = MODELS[0]
    trees = [deterministic(models.draft, TREES["siblings"])]
    emitted = Enumerated(simulated, spec, models, trees, residual_kept=True)
    assert distance(emitted, models.target, 2) > WRONG


def test_a_rule_that_is_laxer_than_match_is_noticed(simulated):
    emitted = enumerated(simulated, "typical", MODELS[0], CHAINS[2])
    assert distance(emitted, MODELS[0].target, 3) > WRONG


def accepted_in(core, spec: str, models: Models, shape: Shape, replacement: bool = False) -> float:
    return enumerated(core, spec, models, shape, replacement).accepted


@pytest.mark.full
def test_block_accepts_at_least_as_much_as_rejection_in_every_case(simulated):
    gains = []
    for seed in range(1000):
        models, chain = Models(3, 1000 + seed), CHAINS[2 + seed % 2]
        gains.append(
            accepted_in(simulated, "block", models, chain) - accepted_in(simulated, "rejection", models, chain)
        )
    assert min(gains) >= -ROUNDING and np.mean(gains) > WRONG


@pytest.mark.full
def test_traversal_accepts_at_least_as_much_as_rejection_and_distinct_siblings_as_repeated_ones(simulated):
    shape, gains, from_distinct = (((),), ((),)), [], []
    for seed in range(1000):
        models = Models(3, 1000 + seed)
        rejection, repeated = (accepted_in(simulated, "rejection", models, shape, r) for r in (False, True))
        gains.append(accepted_in(simulated, "traversal", models, shape) - rejection)
        from_distinct.append(rejection - repeated)
    assert min(gains) >= -ROUNDING and np.mean(gains) > WRONG
    assert np.mean(from_distinct) > WRONG
