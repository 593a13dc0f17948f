"""The core's functions over drafted trees against Python's, on random trees: equal to the last bit."""

from random import Random

import pytest

from specengine import _C
from specengine.draft_trees.cut import cut_trees
from specengine.draft_trees.join import join_trees
from specengine.draft_trees.scored_tree import ScoredTree, judge_nodes
from tests.draft_trees import reference

SEEDS = range(300)


def random_tree(draw: Random, most: int = 24, tokens: int = 4) -> ScoredTree:
    """Siblings have different tokens; some chances are equal, some certain."""
    size = draw.randint(1, most)
    drafted, parents, chances, there = [7], [-1], [1.0], set()
    while len(drafted) < size:
        pair = (draw.choice([len(drafted) - 1, draw.randrange(len(drafted))]), draw.randrange(tokens))
        if pair in there:
            tokens += 1  # ends even where every pair was there
            continue
        there.add(pair)
        parents.append(pair[0])
        drafted.append(pair[1])
        chances.append(draw.choice([draw.random(), 0.5, 1.0, 0.0]))
    return ScoredTree(drafted, parents, chances)


def random_text(draw: Random, tree: ScoredTree) -> list[int]:
    """A path of the tree, perhaps with more tokens behind it."""
    node, path = draw.randrange(len(tree.tokens)), []
    while node:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1] + [draw.randrange(4) for _ in range(draw.randrange(3))]


def test_joined_trees_are_those_of_the_reference():
    for seed in SEEDS:
        draw = Random(seed)
        first, second = random_tree(draw), random_tree(draw)
        for pooled in (False, True):
            joined = join_trees(first, second, pooled=pooled)
            assert joined == reference.join_trees(first, second, pooled), seed


def test_cut_trees_are_those_of_the_reference():
    sizes = set()
    for seed in SEEDS:
        draw = Random(seed)
        trees = [random_tree(draw) for _ in range(draw.choice([1, 1, 2, 5]))]
        steps = sorted(draw.choice([draw.random(), 0.5]) for _ in range(200))
        price, most = draw.choice([0.0, draw.random(), 10 * draw.random()]), draw.choice([0, 3, 15, 64])
        cut = cut_trees(trees, price, steps.__getitem__, most)
        assert cut == reference.cut_trees(trees, price, steps.__getitem__, most), seed
        sizes.add(max(len(tree.tokens) for tree in cut))
    assert len(sizes) > 10


def test_judged_nodes_are_those_of_the_reference():
    for seed in SEEDS:
        draw = Random(seed)
        tree = random_tree(draw)
        text = random_text(draw, tree)
        assert judge_nodes(tree, text) == list(reference.judge_nodes(tree, text)), seed


def test_counted_sources_are_those_of_the_reference():
    for seed in SEEDS:
        draw = Random(seed)
        sources = [(draw.choice("abc"), random_tree(draw)) for _ in range(draw.randint(1, 4))]
        tree = random_tree(draw)
        for _, source in sources:
            tree = join_trees(tree, source)
        text = random_text(draw, tree)
        (tree,) = cut_trees([tree], 0.0, float, draw.choice([2, 10, 64]))
        columns = [(name, source.tokens, source.parents) for name, source in sources]
        counts = _C.count_sources(tree.tokens, tree.parents, columns, text)
        assert counts == reference.count_sources(tree, sources, text), seed


def test_trees_with_other_parents_are_refused():
    good = ScoredTree([1, 2], [-1, 0], [1.0, 0.5])
    for tree, message in (
        (ScoredTree([1, 2], [-1, 1], [1.0, 0.5]), "parents: parent of node 1 is 1"),
        (ScoredTree([1, 2], [-1, -1], [1.0, 0.5]), "parents: parent of node 1 is -1"),
        (ScoredTree([1, 2], [0, 0], [1.0, 0.5]), "parents: parent of node 0 is 0"),
        (ScoredTree([1, 2], [-1], [1.0, 0.5]), "parents: expected one per node"),
        (ScoredTree([], [], []), "parents: expected one per node"),
        (ScoredTree([1, 2], [-1, 0], [1.0]), "chances: expected 2, one per node, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            join_trees(good, tree)
        with pytest.raises(ValueError, match=message):
            join_trees(tree, good)
        with pytest.raises(ValueError, match=message):
            _C.cut_trees([tree.columns], [0.0, 0.0], 4)
    with pytest.raises(ValueError, match="parents: "):
        judge_nodes(ScoredTree([1, 2], [-1, 1], []), [2])
    with pytest.raises(ValueError, match="parents: "):
        _C.count_sources([1], [-1], [("a", [1, 2], [-1, 1])], [])
    with pytest.raises(ValueError, match="costs: expected 2"):
        _C.cut_trees([good.columns], [0.0], 4)
    with pytest.raises(ValueError, match="most: "):
        _C.cut_trees([good.columns], [0.0, 0.0], -1)
