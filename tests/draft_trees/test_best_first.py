"""Trees that grow from the likeliest node on: their nodes, their order, and what ends them."""

import itertools
from math import log

import pytest

from specengine.draft_trees.best_first import ddtree, jetspec_tree
from tests.drafters.requests import path_to

LEVELS = [([10, 11, 12], [0.6, 0.3, 0.1]), ([20, 21, 22], [0.5, 0.3, 0.2]), ([30, 31], [0.9, 0.1])]


def expand(node, parent, depth, token):
    tokens, chances = LEVELS[depth]
    return tokens, [log(chance) for chance in chances]


def paths(tree):
    return [tuple(path_to(tree, node)) for node in range(1, len(tree.tokens))]


def chance(path):
    product = 1.0
    for (tokens, chances), token in zip(LEVELS, path, strict=False):
        product *= chances[tokens.index(token)]
    return product


@pytest.mark.parametrize("nodes", [2, 5, 9, 14, 40])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_a_ddtree_has_the_likeliest_prefixes_in_order(nodes, levels):
    every = [path for depth in range(levels) for path in itertools.product(*(each[0] for each in LEVELS[: depth + 1]))]
    found = paths(ddtree(5, expand, nodes, levels))
    assert len(found) == min(nodes - 1, len(every))
    assert {*found} == {*sorted(every, key=chance, reverse=True)[: len(found)]}
    assert all(chance(a) >= chance(b) - 1e-12 for a, b in itertools.pairwise(found))


def test_a_ddtree_takes_the_lower_ranks_of_equal_prefixes():
    even = ddtree(5, lambda *_: ([1, 2], [log(0.5), log(0.5)]), 4, 2)
    assert paths(even) == [(1,), (2,), (1, 1)]


def test_the_likeliest_node_of_a_jetspec_tree_gets_all_its_children_at_once():
    found = paths(jetspec_tree(5, lambda *_: ([1, 2], [-1.0, -2.0]), 6, 3))
    # below the root, then below 1; 2 is as likely as 1 1 and earlier, and there is room for one of its children
    assert found == [(1,), (2,), (1, 1), (1, 2), (2, 1)]


def test_the_chances_of_nodes_are_those_given_their_parents():
    for grow in (ddtree, jetspec_tree):
        tree = grow(5, expand, 12, 3)
        assert tree.tokens[0] == 5 and tree.parents[0] == -1 and tree.chances[0] == 1
        given = {token: chance for tokens, chances in LEVELS for token, chance in zip(tokens, chances, strict=True)}
        assert tree.chances[1:] == pytest.approx([given[token] for token in tree.tokens[1:]])


def test_one_child_per_node_makes_a_chain():
    for grow in (ddtree, jetspec_tree):
        tree = grow(5, lambda _, __, depth, ___: ([depth], [log(0.1)]), 60, 3)
        assert tree.parents == [-1, 0, 1, 2] and tree.tokens == [5, 0, 1, 2]


@pytest.mark.parametrize("grow", [ddtree, jetspec_tree])
def test_no_node_is_deeper_than_the_levels(grow):
    assert max(map(len, paths(grow(5, expand, 100, 2)))) == 2
