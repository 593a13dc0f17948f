"""Two drafters' trees as one, and what a node is worth by what both say of it."""

import random

import pytest

from specengine.draft_policy.acceptance import Agreement
from specengine.draft_trees.scored_tree import ScoredTree

ONE = ScoredTree([7, 1, 2, 3], [-1, 0, 1, 1], [1.0, 0.4, 0.5, 0.1])
TWO = ScoredTree([7, 4, 1, 2, 5], [-1, 0, 0, 2, 3], [1.0, 0.1, 0.3, 0.9, 0.6])


def by_path(tree):
    paths, reached = {}, [()]
    for node in range(1, len(tree.tokens)):
        assert tree.parents[node] < node
        reached.append((*reached[tree.parents[node]], tree.tokens[node]))
        paths[reached[-1]] = tree.chances[node]
    return paths


def joined(one, two, agreement=None):
    return by_path((agreement or Agreement()).join(one, two)[0])


def test_a_joint_tree_holds_every_path_once_and_begins_with_the_surer_word():
    tree, verdicts = Agreement().join(ONE, TWO)
    assert by_path(tree) == {(1,): 0.4, (1, 2): 0.9, (1, 3): 0.1, (4,): 0.1, (1, 2, 5): 0.6}
    assert len(tree.tokens) == len(verdicts) == 6
    assert joined(ONE, ScoredTree.root(7)) == by_path(ONE)
    assert joined(ScoredTree.root(7), TWO) == by_path(TWO)


def test_it_learns_what_a_word_is_worth_where_the_other_says_the_same_another_or_nothing():
    """A drafter says a token, the other one the same, another one, or nothing; the text goes by chance."""
    random.seed(0)
    agreement, meant = Agreement(), {"same": 0.9, "other": 0.2, "nothing": 0.5}
    one = ScoredTree([7, 1], [-1, 0], [1.0, 0.6])
    others = {
        "same": ScoredTree([7, 1], [-1, 0], [1.0, 0.4]),
        "other": ScoredTree([7, 2], [-1, 0], [1.0, 0.1]),
        "nothing": ScoredTree.root(7),
    }
    for _ in range(1500):
        for case, other in others.items():
            agreement.observe(*agreement.join(one, other), [1 if random.random() < meant[case] else 3])
    for case, other in others.items():
        assert joined(one, other, agreement)[(1,)] == pytest.approx(meant[case], abs=0.06)


def test_chances_stay_chances():
    agreement = Agreement()
    for _ in range(3000):
        agreement.observe(*agreement.join(ONE, TWO), [1, 2, 5])
    assert all(0 < chance <= 1 for chance in joined(ONE, TWO, agreement).values())
