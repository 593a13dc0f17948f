"""The exact laws of lossy rules equal their definitions in numpy, for rules that are no mixture of distributions."""

from functools import partial

import numpy as np
import pytest

from tests.rules.drafting import CHAINS, TREES, Drafted, Masked, Models, deterministic
from tests.rules.enumerating import MASKED, MODELS, ROUNDING, WRONG, chosen, depth_of, distance, enumerated
from tests.rules.exact_law import Enumerated

pytestmark = pytest.mark.sim

SHAPES = [CHAINS[3], *TREES.values()]


def one_hot(vocab: int, token: int) -> np.ndarray:
    return (np.arange(vocab) == token).astype(float)


def children_of(tree: Drafted, path) -> list[int]:
    """Lists the tokens of the children of the node at a path, in the order of the tree; empty without that node."""
    nodes = [node for node, own in enumerate(tree.paths) if own == path]
    return [tree.tokens[child] for child, parent in enumerate(tree.parents) if parent in nodes[:1]]


# ---- lossy: min(1, p / ((1 - alpha) q)), then norm(max(p / beta - q, 0))


def lenient(models: Models, depth: int, alpha: float, beta: float, path) -> np.ndarray:
    target, draft = models.target(path), models.draft(path)
    if len(path) == depth or not draft.size:
        return target
    uncut = 1.0  # the chance that the node's mask leaves it its child; without a child the target is drawn
    if isinstance(models, Masked):
        uncut = models.unmasked_draft(path)[models.allowed(path)].sum()
    ratio = np.divide(target, (1 - alpha) * draft, out=np.ones_like(target), where=draft > 0)
    accepted = draft * np.minimum(1, ratio)
    residual = np.maximum(target / beta - draft, 0)
    refused = residual / residual.sum() if residual.any() else target
    return uncut * (accepted + (1 - accepted.sum()) * refused) + (1 - uncut) * target


@pytest.mark.parametrize("depth", CHAINS)
@pytest.mark.parametrize(("alpha", "beta"), [(0, 1), (0.3, 1), (0.3, 0.8), (0.6, 0.4)])
def test_lossy_emits_the_law_of_lenient_acceptance_on_sampled_chains(simulated, alpha, beta, depth):
    from_target = []
    for models in [*MODELS, *MASKED]:
        emitted = enumerated(simulated, f"lossy:alpha={alpha},beta={beta}", models, CHAINS[depth])
        assert distance(emitted, partial(lenient, models, depth, alpha, beta), depth + 1) <= ROUNDING, models
        from_target.append(distance(emitted, models.target, depth + 1))
    assert (max(from_target) > WRONG) == (alpha > 0)


# ---- typical: the most likely child with p > min(epsilon, delta exp(-H)) where paths are equally long, else the target


def typical(models: Models, tree: Drafted, epsilon: float, delta: float, path) -> np.ndarray:
    target, children = models.target(path), children_of(tree, path)
    surprise = np.log(np.where(target > 0, target, 1))
    threshold = min(epsilon, delta * np.exp((target * surprise).sum()))
    liked = [token for token in children if target[token] > threshold]
    return one_hot(models.vocab, max(liked, key=lambda token: target[token])) if liked else target


@pytest.mark.parametrize("shape", [*CHAINS.values(), TREES["siblings"]])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.09, 0.3), (0.3, 1.0), (0.5, 0.4), (1, 1e9)])
def test_typical_takes_typical_children_and_else_the_token_that_the_target_draws(simulated, epsilon, delta, shape):
    from_target = []
    for models in [*MODELS, *MASKED]:
        tree = chosen(models, shape)
        emitted = Enumerated(simulated, f"typical:epsilon={epsilon},delta={delta}", models, [tree])
        reference = partial(typical, models, tree, epsilon, delta)
        assert distance(emitted, reference, depth_of(shape) + 1) <= ROUNDING, models
        from_target.append(distance(emitted, models.target, depth_of(shape) + 1))
    assert (max(from_target) > WRONG) == (epsilon < 1)


def test_typical_follows_the_longest_path_and_of_equals_the_likeliest(simulated):
    """Both children of the root are typical; only the less likely one has a child."""
    rows = {(): [0.5, 0.4, 0.1], (0,): [0.02, 0.08, 0.9], (1,): [0.6, 0.3, 0.1], (1, 0): [0.2, 0.3, 0.5]}
    (outcome,) = {
        node
        for node, _, _ in simulated.rule_law(
            *("typical", (0.25, 1e9), [-1, 0, 0, 1, 2, 2], [0, 0, 1, 0, 0, 1]),
            [rows.get(path, [1, 0, 0]) for path in [(), (0,), (1,), (0, 0), (1, 0), (1, 1)]],
            [[]] * 6,
            replacement=False,
            residual_kept=False,
        )
        if node
        != 3  # the atypical child, where the target draws it, is as deep as the two typical ones but less likely
    }
    assert outcome == 4


# ---- margin: scores of the exact law are log-probabilities plus 2


def close_pair(target: np.ndarray, theta: float) -> list[int]:
    """Returns the two best tokens where their scores are close, else none."""
    with np.errstate(divide="ignore"):
        scores = np.log(target) + 2
    best, second = np.argsort(-scores, kind="stable")[:2]
    positive = scores[best] > 0 and scores[second] > 0
    return [int(best), int(second)] if positive and scores[second] / scores[best] > theta else []


def marginal(models: Models, tree: Drafted, theta: float, strict: bool, path) -> np.ndarray:
    target, children = models.target(path), children_of(tree, path)
    taken = [token for token in close_pair(target, theta) if token in children]
    if taken:
        return one_hot(models.vocab, taken[0])
    return one_hot(models.vocab, int(target.argmax())) if strict else target


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("theta", [0.3, 0.6, 1])
@pytest.mark.parametrize("mode", ["strict", "lossless-base"])
def test_margin_takes_close_runners_up_and_else_its_base(simulated, mode, theta, shape):
    strict, runners_up, from_base = mode == "strict", 0, []
    for models in [*MODELS, *MASKED, *(Models(3, seed) for seed in range(10, 30))]:
        tree = chosen(models, shape)
        emitted = Enumerated(simulated, f"margin:{mode},theta={theta}", models, [tree])
        assert distance(emitted, partial(marginal, models, tree, theta, strict), depth_of(shape) + 1) <= ROUNDING
        base = partial(marginal, models, tree, 1, strict)
        from_base.append(distance(emitted, base, depth_of(shape) + 1))
        runners_up += len(close_pair(models.target(()), theta)) > 0
    assert (max(from_base) > WRONG) == (theta < 1) == (runners_up > 0)


def as_published(models: Models, tree: Drafted, theta: float, path) -> np.ndarray:
    """The public implementation at temperature 1: scores of any sign, and one lowered entry for a refused child."""
    target, draft = models.target(path), models.draft(path)
    with np.errstate(divide="ignore"):
        scores = np.log(target) + 2
    best, second = np.argsort(-scores, kind="stable")[:2]
    close = target[second] > 0 and scores[second] / (scores[best] + 1e-10) > theta
    law, left, reached = np.zeros(models.vocab), target, 1.0
    for token in children_of(tree, path):
        if close:
            if token in (best, second):
                law[token] += reached
                return law
            continue
        chance = min(1, left[token] / draft[token])
        law[token] += reached * chance
        reached *= 1 - chance
        left = np.where(np.arange(models.vocab) == token, np.maximum(left - draft, 0), left)
        if reached == 0:
            return law
        left = left / left.sum()
    return law + reached * left


@pytest.mark.parametrize("shape", [CHAINS[3], ((), ()), (((),), ((),))])
@pytest.mark.parametrize("theta", [0.3, 0.9, 1])
def test_margin_reference_equals_the_published_implementation(simulated, theta, shape):
    from_target = []
    for models in [Models(3, 1), Models(4, 3), Models(5, 4), *(Models(3, seed) for seed in range(10, 20))]:
        tree = deterministic(models.draft, shape)
        emitted = Enumerated(simulated, f"margin:reference,theta={theta}", models, [tree], draft=models.draft)
        reference = partial(as_published, models, tree, theta)
        assert distance(emitted, reference, depth_of(shape) + 1) <= ROUNDING, models
        from_target.append(distance(emitted, models.target, depth_of(shape) + 1))
    assert max(from_target) > WRONG  # theta = 1 included: no parameter makes it exact
