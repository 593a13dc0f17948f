"""expand_backbone against its reference, a hand-computed tree, and the ancestor masks of the cases."""

import pytest
import torch

from specengine import _C
from specengine.ops.expand_backbone import BackboneTrees, expand_backbone, expand_backbone_reference
from tests.ops.cases import ancestor_bits, comb, depths_of, randn

pytestmark = pytest.mark.usefixtures("instruction_set")

CAPE = ([8, 6, 4, 2], [0.3, 0.6, 0.8])


def check(logits: torch.Tensor, widths, thresholds=()) -> BackboneTrees:
    root = torch.arange(len(logits), dtype=torch.int32) + 5
    trees = expand_backbone(logits, root, widths, thresholds)
    expected = expand_backbone_reference(logits, root, widths, thresholds)
    for name in ("tokens", "parents", "depths", "ancestors", "node_counts"):
        assert torch.equal(getattr(trees, name), getattr(expected, name)), name
    torch.testing.assert_close(trees.scores, expected.scores, rtol=1e-5, atol=1e-5)
    return trees


def test_two_levels_of_two_by_hand():
    probs = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]])
    trees = check(probs.log(), [2])
    assert trees.tokens.tolist() == [[5, 2, 1, 0, 1]]
    assert trees.parents.tolist() == [[-1, 0, 0, 1, 1]]
    assert trees.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert trees.ancestors.tolist() == [[[0b1], [0b11], [0b101], [0b1011], [0b10011]]]
    expected = torch.tensor([[1, 0.7, 0.2, 0.35, 0.21]]).log()
    torch.testing.assert_close(trees.scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3, 10])
@pytest.mark.parametrize("levels", [0, 1, 7, 25])
@pytest.mark.parametrize("vocab", [10, 64, 333])
def test_constant_widths_match_the_reference(width, levels, vocab):
    check(3 * randn(3, levels, vocab, seed=vocab), [width])


@pytest.mark.parametrize("scale", [0.1, 1, 3, 8, 30])
def test_confidence_bins_match_the_reference(scale):
    trees = check(scale * randn(6, 7, 200, seed=3), *CAPE)
    assert trees.node_counts.max() <= 1 + 7 * 8


def test_confidence_decides_the_width_of_each_level():
    certain, unsure = torch.full((40,), -9.0), torch.zeros(40)
    certain[11] = 9.0
    trees = check(torch.stack([certain, unsure, certain])[None], *CAPE)
    assert trees.node_counts.tolist() == [1 + 2 + 8 + 2]


def test_equal_scores_go_to_the_lower_token():
    logits = torch.zeros(1, 2, 100)
    logits[0, 1, [70, 20]] = 1.0
    trees = check(logits, [3])
    assert trees.tokens.tolist() == [[5, 0, 1, 2, 20, 70, 0]]


def test_masks_and_depths_are_those_of_the_comb():
    trees = check(randn(1, 21, 50), [3])
    tree = comb(64)
    assert trees.parents[0].tolist() == tree
    assert torch.equal(trees.ancestors[0], ancestor_bits([tree]))
    assert torch.equal(trees.depths[0], depths_of([tree]))


def test_trees_of_256_nodes_are_built_and_larger_ones_refused():
    assert check(randn(1, 51, 30), [5]).node_counts.tolist() == [256]
    with pytest.raises(ValueError, match=r"^tokens: N=257"):
        expand_backbone(randn(1, 32, 30), torch.zeros(1, dtype=torch.int32), [8])


def test_masked_tokens_are_allowed_as_long_as_a_level_has_one_left():
    logits = torch.full((1, 1, 20), -torch.inf)
    logits[0, 0, 7] = 3.0
    assert check(logits, [1]).tokens.tolist() == [[5, 7]]


def test_an_empty_batch_is_accepted():
    trees = expand_backbone(torch.empty(0, 3, 10), torch.empty(0, dtype=torch.int32), [2])
    assert trees.tokens.shape == (0, 7) and trees.node_counts.shape == (0,)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_scores_without_a_distribution_are_refused(value):
    logits = randn(2, 3, 50)
    logits[1, 2, 49] = value
    with pytest.raises(ValueError, match=r"^logits: .*\[1, 2"):
        expand_backbone(logits, torch.zeros(2, dtype=torch.int32), [2])
    with pytest.raises(ValueError, match=r"^logits: "):
        expand_backbone(torch.full((1, 1, 8), -torch.inf), torch.zeros(1, dtype=torch.int32), [2])


@pytest.mark.parametrize(
    "widths, thresholds, argument",
    [
        ([0], [], "top_tokens"),
        ([51], [], "top_tokens"),
        ([3, 0], [0.5], "widths"),
        ([3, 2], [], "widths"),
        ([3], [0.5], "widths"),
        ([3, 2, 1], [0.5, 0.5], "thresholds"),
        ([3, 2], [float("nan")], "thresholds"),
    ],
)
def test_widths_and_thresholds_that_do_not_fit_are_refused(widths, thresholds, argument):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        expand_backbone(randn(1, 2, 50), torch.zeros(1, dtype=torch.int32), widths, thresholds)


def test_neither_batch_nor_threads_change_a_bit():
    logits, root = 3 * randn(9, 7, 333), torch.arange(9, dtype=torch.int32)
    _C.set_num_threads(1)
    alone = [expand_backbone(logits[b : b + 1], root[b : b + 1], *CAPE) for b in range(9)]
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        together = expand_backbone(logits, root, *CAPE)
        for name in ("tokens", "parents", "scores", "ancestors"):
            assert torch.equal(getattr(together, name), torch.cat([getattr(t, name) for t in alone]))
