"""expand_backbone against its reference, a hand-computed tree, and the ancestor masks of the cases."""

import pytest
import torch

from specengine import _C
from specengine.ops.expand_backbone import (
    BackboneExpander,
    BackboneTrees,
    expand_backbone,
    expand_backbone_reference,
)
from tests.ops.cases import ancestor_bits, comb, depths_of, randn

CAPE = ([8, 6, 4, 2], [0.3, 0.6, 0.8])
PART = _C.VOCABULARY_PART
POISON = -77


def expand(backend, logits: torch.Tensor, root: torch.Tensor, widths, thresholds=()) -> BackboneTrees:
    """On the backend, into poisoned trees and workspace; the trees on the CPU."""
    expander = BackboneExpander(*logits.shape, widths, thresholds, backend.device)
    *scratch, arrived = expander._workspace
    for tensor in (*vars(expander.trees).values(), *scratch):
        tensor.fill_(torch.nan if tensor.is_floating_point() else POISON)
    trees = expander(backend.put(logits), backend.put(root))
    assert not arrived.any()
    return BackboneTrees(**{name: tensor.cpu() for name, tensor in vars(trees).items()})


def check(backend, logits: torch.Tensor, widths, thresholds=(), root: torch.Tensor | None = None) -> BackboneTrees:
    root = torch.arange(len(logits), dtype=torch.int32) + 5 if root is None else root
    trees = expand(backend, logits, root, widths, thresholds)
    expected = expand_backbone_reference(logits, root, widths, thresholds)
    for name in ("tokens", "parents", "depths", "ancestors", "node_counts"):
        assert torch.equal(getattr(trees, name), getattr(expected, name)), name
    torch.testing.assert_close(trees.scores, expected.scores, rtol=1e-5, atol=1e-5)
    return trees


def test_two_levels_of_two_by_hand(backend):
    probs = torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]])
    trees = check(backend, probs.log(), [2])
    assert trees.tokens.tolist() == [[5, 2, 1, 0, 1]]
    assert trees.parents.tolist() == [[-1, 0, 0, 1, 1]]
    assert trees.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert trees.ancestors.tolist() == [[[0b1], [0b11], [0b101], [0b1011], [0b10011]]]
    expected = torch.tensor([[1, 0.7, 0.2, 0.35, 0.21]]).log()
    torch.testing.assert_close(trees.scores, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocab", [10, PART + 20])
def test_trees_may_have_other_tokens_than_the_logits(backend, vocab):
    logits, root, ids = 3 * randn(2, 3, vocab), torch.tensor([7, 8], dtype=torch.int32), 2 * torch.arange(vocab) + 1
    plain = expand_backbone(logits, root, [3])
    expander = BackboneExpander(2, 3, vocab, [3], device=backend.device)
    trees = expander(backend.put(logits), backend.put(root), backend.put(ids.int()))
    assert trees.tokens[:, 0].tolist() == [7, 8]
    assert trees.tokens[:, 1:].tolist() == ids[plain.tokens[:, 1:].long()].tolist()
    assert trees.parents.tolist() == plain.parents.tolist()
    with pytest.raises(ValueError, match=r"^token_ids: expected shape"):
        expander(backend.put(logits), backend.put(root), backend.put(ids[1:].int()))


@pytest.mark.parametrize("width", [1, 2, 3, 10])
@pytest.mark.parametrize("levels", [0, 1, 7, 25])
@pytest.mark.parametrize("vocab", [10, 64, 333])
def test_constant_widths_match_the_reference(backend, width, levels, vocab):
    check(backend, 3 * randn(3, levels, vocab, seed=vocab), [width])


@pytest.mark.parametrize("vocab", [1, 2, 63, 65, 1000, PART - 1, PART, PART + 1, 3 * PART + 20])
def test_vocabularies_of_any_size_match_the_reference(backend, vocab):
    check(backend, 3 * randn(2, 2, vocab, seed=vocab), [min(vocab, 9)])


def test_a_large_vocabulary_matches_the_reference(backend):
    check(backend, 3 * randn(1, 2, 49152), *CAPE)


@pytest.mark.parametrize("width, levels, vocab", [(64, 3, 64), (255, 1, 255), (255, 1, 1000), (127, 2, PART + 100)])
def test_wide_levels_match_the_reference(backend, width, levels, vocab):
    check(backend, randn(1, levels, vocab), [width])


def test_the_best_tokens_may_all_lie_in_one_place(backend):
    logits = randn(1, 3, 3 * PART)
    logits[0, 0, 300:400] += 20
    logits[0, 1, PART - 50 : PART + 50] += 20
    logits[0, 2, -100:] += 20
    check(backend, logits, [40])


def test_more_parts_of_a_vocabulary_than_lanes_of_a_warp_are_merged(backend):
    logits = torch.zeros(1, 1, 33 * PART + 9)
    logits[0, 0, [5, 32 * PART + 5, 6, PART + 5, 32 * PART + 6, 7]] = torch.tensor([6.0, 5, 4, 3, 2, 1])
    assert check(backend, logits, [8]).tokens[0, 1:4].tolist() == [5, 32 * PART + 5, 6]


@pytest.mark.parametrize("scale", [0.1, 1, 3, 8, 30])
def test_confidence_bins_match_the_reference(backend, scale):
    trees = check(backend, scale * randn(6, 7, 200, seed=3), *CAPE)
    assert trees.node_counts.max() <= 1 + 7 * 8


def test_confidence_decides_the_width_of_each_level(backend):
    certain, unsure = torch.full((40,), -9.0), torch.zeros(40)
    certain[11] = 9.0
    trees = check(backend, torch.stack([certain, unsure, certain])[None], *CAPE)
    assert trees.node_counts.tolist() == [1 + 2 + 8 + 2]


def test_equal_scores_go_to_the_lower_token(backend):
    logits = torch.zeros(1, 2, 100)
    logits[0, 1, [70, 20]] = 1.0
    logits[0, 0, 1] = -0.0
    trees = check(backend, logits, [3])
    assert trees.tokens.tolist() == [[5, 0, 1, 2, 20, 70, 0]]


@pytest.mark.parametrize("vocab", [300, 2 * PART + 700])
def test_many_equal_scores_go_to_the_lower_tokens(backend, vocab):
    check(backend, (2 * randn(2, 2, vocab)).round(), [20])
    check(backend, torch.zeros(1, 1, vocab), [20])


def test_masks_and_depths_are_those_of_the_comb(backend):
    trees = check(backend, randn(1, 21, 50), [3])
    tree = comb(64)
    assert trees.parents[0].tolist() == tree
    assert torch.equal(trees.ancestors[0], ancestor_bits([tree]))
    assert torch.equal(trees.depths[0], depths_of([tree]))


@pytest.mark.parametrize("width, levels", [(5, 51), (1, 255)])
def test_trees_of_256_nodes_are_built_and_larger_ones_refused(backend, width, levels):
    assert check(backend, randn(1, levels, 30), [width]).node_counts.tolist() == [256]
    with pytest.raises(ValueError, match=r"^tokens: N=257"):
        expand_backbone(backend.put(randn(1, 32, 30)), backend.put(torch.zeros(1, dtype=torch.int32)), [8])


def test_masked_tokens_are_allowed_as_long_as_a_level_has_one_left(backend):
    logits = torch.full((1, 2, PART + 20), -torch.inf)
    logits[0, 0, 7], logits[0, 1, PART + 3] = 3.0, -2.0
    assert check(backend, logits, [1]).tokens.tolist() == [[5, 7, PART + 3]]


def test_an_idle_request_gets_no_nodes_and_its_logits_are_not_read(backend):
    logits, root = randn(3, 2, 50), torch.tensor([4, -1, 0], dtype=torch.int32)
    logits[1] = torch.nan
    trees = check(backend, logits, [3], root=root)
    assert trees.node_counts.tolist() == [7, 0, 7]
    assert trees.tokens[1].tolist() == trees.parents[1].tolist() == trees.depths[1].tolist() == [-1] * 7


def test_an_empty_batch_is_accepted(backend):
    logits, root = backend.put(torch.empty(0, 3, 10)), backend.put(torch.empty(0, dtype=torch.int32))
    trees = expand_backbone(logits, root, [2])
    assert trees.tokens.shape == (0, 7) and trees.node_counts.shape == (0,)


NO_DISTRIBUTION = [(49, torch.nan), (0, -torch.nan), (49, torch.inf), (slice(None), -torch.inf)]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("tokens, value", NO_DISTRIBUTION)
def test_scores_without_a_distribution_are_refused(tokens, value):
    logits = randn(2, 3, 50)
    logits[1, 2, tokens] = value
    with pytest.raises(ValueError, match=r"^logits: .*\[1, 2"):
        expand_backbone(logits, torch.zeros(2, dtype=torch.int32), [2])


@pytest.mark.parametrize("vocab", [50, PART + 50])
@pytest.mark.parametrize("tokens, value", NO_DISTRIBUTION)
def test_scores_without_a_distribution_give_minus_one_node_on_cuda(cuda_backend, tokens, value, vocab):
    logits, root = randn(2, 3, vocab), torch.tensor([3, 4], dtype=torch.int32)
    expected = expand(cuda_backend, logits[:1], root[:1], *CAPE)
    logits[1, 2, tokens] = value
    trees = expand(cuda_backend, logits, root, *CAPE)
    assert trees.node_counts.tolist() == [expected.node_counts.item(), -1]
    assert torch.equal(trees.tokens[0], expected.tokens[0])
    for name, padding in {"tokens": -1, "parents": -1, "depths": -1, "scores": 0, "ancestors": 0}.items():
        assert getattr(trees, name)[1, 1:].eq(padding).all()
    assert (trees.tokens[1, 0], trees.depths[1, 0], trees.ancestors[1, 0, 0]) == (4, 0, 1)  # the root alone


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
@pytest.mark.usefixtures("instruction_set")
def test_widths_and_thresholds_that_do_not_fit_are_refused(widths, thresholds, argument):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        expand_backbone(randn(1, 2, 50), torch.zeros(1, dtype=torch.int32), widths, thresholds)


@pytest.mark.usefixtures("instruction_set")
def test_neither_batch_nor_threads_change_a_bit():
    logits, root = 3 * randn(9, 7, 333), torch.arange(9, dtype=torch.int32)
    _C.set_num_threads(1)
    alone = [expand_backbone(logits[b : b + 1], root[b : b + 1], *CAPE) for b in range(9)]
    for threads in (1, 2, 3):
        _C.set_num_threads(threads)
        assert_joined(expand_backbone(logits, root, *CAPE), alone)


def assert_joined(together: BackboneTrees, alone: list[BackboneTrees]) -> None:
    for name, tensor in vars(together).items():
        assert torch.equal(tensor, torch.cat([getattr(trees, name) for trees in alone])), name


def test_neither_batch_nor_address_change_a_bit_on_cuda(cuda_backend):
    logits, root = 3 * randn(3, 2, PART + 333), torch.arange(3, dtype=torch.int32)
    alone = [expand(cuda_backend, logits[b : b + 1], root[b : b + 1], *CAPE) for b in range(3)]
    assert_joined(expand(cuda_backend, logits, root, *CAPE), alone)


@pytest.mark.sim
def test_the_order_of_threads_and_blocks_changes_no_bit(simulated, monkeypatch):
    monkeypatch.setattr("specengine.ops.expand_backbone._C", simulated)
    logits, root = (2 * randn(2, 3, 2 * PART + 10)).round(), torch.tensor([1, 2], dtype=torch.int32)
    results = []
    for seed in range(4):
        simulated.set_schedule(seed)
        results.append(expand_backbone(logits, root, *CAPE))
    for trees in results[1:]:
        assert_joined(trees, [results[0]])


def test_an_expander_serves_call_after_call_with_the_same_trees(backend):
    expander = BackboneExpander(2, 3, 40, *CAPE, device=backend.device)
    root = torch.tensor([1, 2], dtype=torch.int32)
    for seed in range(3):
        logits = 3 * randn(2, 3, 40, seed=seed)
        trees = expander(backend.put(logits), backend.put(root))
        assert trees is expander.trees
        expected = expand_backbone_reference(logits, root, *CAPE)
        assert torch.equal(trees.tokens.cpu(), expected.tokens)
