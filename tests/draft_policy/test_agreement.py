import random

import pytest

from specengine.draft_policy.agreement import Agreement
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


def test_a_joint_tree_holds_every_path_once_and_begins_with_the_surer_word():
    joint = Agreement().join(ONE, TWO)
    assert by_path(joint.tree) == {(1,): 0.4, (1, 2): 0.9, (1, 3): 0.1, (4,): 0.1, (1, 2, 5): 0.6}
    assert len(joint.tree.tokens) == len(joint.surer) == len(joint.kinds) == 6
    alone = Agreement().join(ONE, ScoredTree.root(7)).tree
    assert by_path(alone) == by_path(ONE)
    assert by_path(Agreement().join(ScoredTree.root(7), TWO).tree) == by_path(TWO)


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
            joint = agreement.join(one, other)
            agreement.observe(joint, [1 if random.random() < meant[case] else 3])
    for case, other in others.items():
        assert by_path(agreement.join(one, other).tree)[(1,)] == pytest.approx(meant[case], abs=0.06)


def test_chances_stay_chances():
    agreement = Agreement()
    for _ in range(3000):
        agreement.observe(agreement.join(ONE, TWO), [1, 2, 5])
    assert all(0 < chance <= 1 for chance in agreement.join(ONE, TWO).tree.chances)
