"""DraftTree and TreeBatch: what trees are refused, and how a batch of them is laid out."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine._C import TreeRows
from specengine.draft_trees.tree import KEPT, DraftTree, TreeBatch, TreeLayout

CPU = torch.device("cpu")


def tree_of(*parents: int) -> DraftTree:
    return DraftTree([10 * node for node in range(len(parents))], parents)


def bits_of(batch: TreeBatch) -> list[int]:
    """The rows of the ancestor masks as unsigned integers of any width."""
    return [sum((word & 0xFFFFFFFF) << 32 * i for i, word in enumerate(row)) for row in batch.ancestors.tolist()]


@pytest.mark.parametrize(
    "parents, message",
    [
        ([], "expected 1 to 256 nodes"),
        ([0], "parent of node 0 is 0"),
        ([-2], "parent of node 0 is -2"),
        ([-1, -1], "parent of node 1 is -1"),
        ([-1, 1], "parent of node 1 is 1"),
        ([-1, 2, 0], "parent of node 1 is 2"),
        ([-1, 0, 5], "parent of node 2 is 5"),
        ([-1] + [0] * 256, "expected 1 to 256 nodes with one parent each, got 257"),
    ],
)
def test_a_tree_whose_parents_are_no_earlier_nodes_is_refused(parents, message):
    with pytest.raises(ValueError, match=f"^tree: {message}"):
        DraftTree([0] * len(parents), parents)


def test_a_tree_with_more_tokens_than_parents_is_refused():
    with pytest.raises(ValueError, match=r"^tree: expected .* one parent each"):
        DraftTree([1, 2, 3], [-1, 0])


def test_trees_of_1_and_of_256_nodes_are_accepted():
    assert TreeBatch.of([tree_of(-1)], CPU).depths.tolist() == [0]
    assert TreeBatch.of([tree_of(-1, *[0] * 255)], CPU).ancestors.shape == (256, 8)


def test_the_layout_of_a_batch():
    batch = TreeBatch.of([tree_of(-1, 0, 0, 2), tree_of(-1), tree_of(-1, 0)], CPU)
    assert batch.tokens.tolist() == [0, 10, 20, 30, 0, 0, 10]
    assert batch.parents.tolist() == [-1, 0, 0, 2, -1, -1, 0]
    assert batch.depths.tolist() == [0, 1, 1, 2, 0, 0, 1]
    assert batch.row_start.tolist() == [0, 4, 5, 7]
    assert bits_of(batch) == [0b1, 0b11, 0b101, 0b1101, 0b1, 0b1, 0b11]
    for tensor in (batch.tokens, batch.parents, batch.depths, batch.row_start, batch.ancestors):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


def test_a_batch_of_chains_needs_no_masks_and_a_single_branch_does():
    assert TreeBatch.of([tree_of(-1, 0, 1, 2), tree_of(-1), tree_of(-1, 0)], CPU).ancestors is None
    assert TreeBatch.of([tree_of(-1, 0, 1, 2), tree_of(-1, 0, 0)], CPU).ancestors is not None


def test_chains_of_any_length_are_laid_out_as_trees_are():
    runs = [list(range(300)), [7], [], [1, 2]]
    batch = TreeBatch.chains(runs, CPU)
    assert batch.ancestors is None
    assert batch.tokens.tolist() == [*range(300), 7, 1, 2]
    assert batch.parents.tolist() == [*range(-1, 299), -1, -1, 0]
    assert batch.depths.tolist() == [*range(300), 0, 0, 1]
    assert batch.row_start.tolist() == [0, 300, 301, 301, 303]


def test_an_empty_batch_has_no_rows():
    for batch in (TreeBatch.of([], CPU), TreeBatch.chains([], CPU)):
        assert batch.tokens.shape == (0,) and batch.row_start.tolist() == [0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 256), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_masks_and_depths_follow_the_parents(sizes, seed):
    rng = random.Random(seed)
    trees = [tree_of(-1, *(rng.randrange(node) for node in range(1, size))) for size in sizes]
    batch = TreeBatch.of(trees, CPU)
    expected, depths = [], []
    for tree in trees:
        for node in range(len(tree.parents)):
            path = [node]
            while tree.parents[path[-1]] >= 0:
                path.append(tree.parents[path[-1]])
            expected.append(sum(1 << i for i in path))
            depths.append(len(path) - 1)
    assert batch.depths.tolist() == depths
    if batch.ancestors is None:
        assert all(list(tree.parents) == list(range(-1, len(tree.parents) - 1)) for tree in trees)
    else:
        assert bits_of(batch) == expected
        assert batch.ancestors.shape[1] == (max(sizes) + 31) // 32


def same(batch: TreeBatch, other: TreeBatch) -> bool:
    names = ("tokens", "parents", "depths", "row_start")
    masks = batch.ancestors is other.ancestors is None or torch.equal(batch.ancestors, other.ancestors)
    return (
        masks
        and batch.nodes == other.nodes
        and all(torch.equal(*(getattr(b, n) for b in (batch, other))) for n in names)
    )


def test_trees_of_sizes_that_were_there_are_written_into_the_same_tensors():
    layout, shape = TreeLayout(CPU), [-1, 0, 0, 2]
    first = [DraftTree([1, 2, 3, 4], shape), DraftTree([5], [-1])]
    batch = layout.of(first)
    for other in ([-1, 0, 1, 1], [-1, 0, 0, 0]):
        trees = [DraftTree([6, 7, 8, 9], other), DraftTree([10], [-1])]
        assert layout.of(trees) is batch and same(batch, TreeBatch.of(trees, CPU))
    shape[3] = 1  # a list that a drafter changes is another shape
    assert layout.of(first) is batch and same(batch, TreeBatch.of(first, CPU))
    for trees in (first[:1], [DraftTree([1, 2, 3, 4], [-1, 0, 1, 2])], [DraftTree([1, 2, 3], [-1, 0, 0])] * 2):
        assert layout.of(trees) is not batch and same(layout.of(trees), TreeBatch.of(trees, CPU))


def test_a_layout_is_that_of_any_batch_and_keeps_few():
    rng, layout = random.Random(0), TreeLayout(CPU)
    for _ in range(3):
        for requests in range(4):
            for size in (1, 2, 5, 33, 100):
                sizes = [rng.randint(1, size) for _ in range(requests)]
                trees = [
                    tree_of(-1, *(rng.choice([node - 1, rng.randrange(node)]) for node in range(1, n))) for n in sizes
                ]
                assert same(layout.of(trees), TreeBatch.of(trees, CPU))
    for size in range(1, 257):
        for parents in (range(-1, size - 1), [-1] + [0] * (size - 1)):
            layout.of([DraftTree([0] * size, parents)])
    assert len(layout._written) <= KEPT


def test_trees_of_other_sizes_are_not_written():
    batch = TreeBatch.of([tree_of(-1, 0, 0)], CPU)
    rows = TreeRows(batch.tokens, batch.parents, batch.depths, batch.row_start, batch.ancestors)
    for tokens, parents, message in (
        ([[1, 2]], [[-1, 0]], "tokens: expected 3 nodes in all, got 2"),
        ([[1, 2], [3]], [[-1, 0], [-1]], "tokens: expected 1 trees, got 2"),
        ([[1, 2, 3]], [[-1, 0, 2]], "parents: parent of node 2 is 2"),
        ([[1, 2, 3]], [[-1, 0]], "parents: expected one per node"),
    ):
        with pytest.raises(ValueError, match=message):
            rows.write(tokens, parents)
    with pytest.raises(ValueError, match="depths: "):
        TreeRows(batch.tokens, batch.parents, batch.depths[:2], batch.row_start, batch.ancestors)
    with pytest.raises(ValueError, match="ancestors: "):
        TreeRows(batch.tokens, batch.parents, batch.depths, batch.row_start, batch.tokens)
