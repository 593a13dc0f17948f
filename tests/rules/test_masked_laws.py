"""Masks keep the law of every rule: cutting a drafted tree, and filtering the distribution it was drawn from."""

from functools import partial

import numpy as np
import pytest

from specengine.rules import RULES
from tests.rules.drafting import CHAINS, TREES, Drafted, Masked, Models, Path, Shape, sampled
from tests.rules.enumerating import MASKED, ROUNDING, WRONG, depth_of, distance, drafted, enumerated
from tests.rules.exact_law import Enumerated, total_variation

pytestmark = pytest.mark.sim

LOSSLESS = [name for name, rule in RULES.items() if rule.lossless]
SPECS = [
    *LOSSLESS,
    *("lossy:alpha=0.3,beta=0.8", "typical", "margin:theta=0.3,mode=strict", "margin:theta=0.3,mode=lossless-base"),
    *("margin:theta=0.3,mode=reference", "cascade:chow,alpha=0.4", "cascade:opt,alpha=0.3", "bild:alpha=1"),
    *(f"cascade:token-{version},alpha=0.3" for version in ("v1", "v2", "v3")),
]
SHAPES = [CHAINS[2], TREES["siblings"], TREES["two levels"]]


class OneToken(Masked):
    """Masks that allow one token behind every path, not always the drafter's favourite."""

    def allowed(self, path: Path) -> np.ndarray:
        return np.arange(self.vocab) == Models(self.vocab, self.seed).target(path).argmax()


def small(models: Models, shape: Shape) -> bool:
    """Returns whether the trees are few enough for a test of a second."""
    return models.vocab ** str(shape).count("(") <= 3000


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_tree_that_the_rule_gets_with_its_masks_has_the_law_of_the_cut_tree(simulated, spec, shape, replacement):
    if spec == "block" and shape != CHAINS[2]:
        return  # block refuses trees
    for models in MASKED:
        if not small(models, shape):
            continue
        cut = enumerated(simulated, spec, models, shape, replacement)
        whole = Enumerated(
            *(simulated, spec, Models(models.vocab, models.seed, models.zeros)),
            sampled(models.unmasked_draft, replacement, shape),
            draft=models.unmasked_draft,
            replacement=replacement,
            masks=models.allowed,
        )
        laws = (emitted.law(models.target, depth_of(shape) + 1) for emitted in (cut, whole))
        assert total_variation(*laws) <= ROUNDING, models
        assert abs(cut.accepted - whole.accepted) <= ROUNDING


@pytest.mark.parametrize("spec", LOSSLESS)
def test_masks_of_one_token_leave_one_text(simulated, spec):
    models, shape = OneToken(4, 3), CHAINS[2] if spec == "block" else TREES["siblings"]
    law = enumerated(simulated, spec, models, shape).law(models.target, depth_of(shape) + 1)
    assert law.max() == pytest.approx(1, abs=ROUNDING)


def distances(core, spec: str, shape: Shape, trees, draft) -> list[float]:
    """Lists the distances from the masked target's law, for twenty models."""
    found = []
    for models in (Masked(4, seed, least=2) for seed in range(20)):
        emitted = Enumerated(core, spec, models, trees(models), draft=draft(models))
        found.append(distance(emitted, models.target, depth_of(shape) + 1))
    return found


@pytest.mark.parametrize("shape", [CHAINS[2], TREES["siblings"]])
@pytest.mark.parametrize("spec", ["rejection", "block", "traversal"])
def test_cutting_without_filtering_the_draft_distribution_is_noticed(simulated, spec, shape):
    if spec == "block" and shape != CHAINS[2]:
        return
    trees = partial(drafted, shape=shape)
    right = distances(simulated, spec, shape, trees, lambda models: models.draft)
    wrong = distances(simulated, spec, shape, trees, lambda models: models.unmasked_draft)
    assert max(right) <= ROUNDING and max(wrong) > WRONG


@pytest.mark.parametrize("spec", ["rejection", "traversal"])
def test_filtering_the_draft_distribution_of_trees_that_are_not_cut_is_noticed(simulated, spec):
    """Then a forbidden child has no probability in either distribution, and the rule would follow it."""
    shape = TREES["siblings"]

    def whole(models: Masked) -> list[Drafted]:
        return list(sampled(models.unmasked_draft, False, shape))

    assert max(distances(simulated, spec, shape, whole, lambda models: models.draft)) > WRONG


def test_a_cascade_whose_cut_nodes_lose_their_draft_distribution_is_noticed(simulated):
    """A node keeps its row of draft logits when all its children are cut: the mixture goes on there."""
    spec, shape, found = "cascade:token-v3,alpha=0.5", CHAINS[1], []
    for models in (Masked(4, seed, least=2) for seed in range(20)):
        trees = list(drafted(models, shape))
        kept = Enumerated(simulated, spec, models, trees, draft=models.draft).law(models.target, 2)
        for tree in trees:
            tree.asked = frozenset()
        lost = Enumerated(simulated, spec, models, trees, draft=models.draft).law(models.target, 2)
        found.append(total_variation(kept, lost))
    assert max(found) > WRONG
