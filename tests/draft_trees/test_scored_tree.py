"""Scored trees compared with the committed text."""

from specengine.draft_trees.scored_tree import ScoredTree, judge_nodes


def test_judged_are_the_children_of_what_was_accepted():
    tree = ScoredTree([7, 1, 2, 3, 4, 5], [-1, 0, 0, 1, 2, 3], [1.0] * 6)
    assert list(judge_nodes(tree, [2, 9])) == [(1, False), (2, True), (4, False)]
    assert list(judge_nodes(tree, [1, 3])) == [(1, True), (2, False), (3, True)]
    assert list(judge_nodes(tree, [])) == []
