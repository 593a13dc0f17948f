import pytest

from specengine._C import MAX_NODES
from specengine.draft_trees.merge import MergedPaths
from specengine.drafters.lookahead.window import JacobiWindow


def test_what_paths_share_is_there_once():
    paths = MergedPaths(9)
    assert paths.add_path(0, [1, 2, 3]) == [1, 2, 3]
    assert paths.add_path(0, [1, 2, 4]) == [1, 2, 4]
    assert paths.add_path(2, [3, 1]) == [3, 5]
    assert paths.tokens == [9, 1, 2, 3, 4, 1] and paths.parents == [-1, 0, 1, 2, 2, 3]
    assert paths.child(2, 4) == 4 and paths.child(2, 5) is None


def test_the_newest_phrases_get_the_room():
    paths = MergedPaths(9)
    phrases = [[token, token] for token in range(1, 200)]
    added = paths.add_phrases(0, phrases, reserve=50)
    assert len(paths.tokens) <= MAX_NODES - 50 < len(paths.tokens) + 2
    assert [paths.tokens[path[0]] for path in added] == [*range(199, 199 - len(added), -1)]


@pytest.mark.parametrize("columns, n", [(1, 2), (4, 2), (1, 5), (7, 5), (20, 8)])
def test_a_window_fills_and_then_brings_an_ngram_per_column(columns, n):
    window, largest = JacobiWindow(columns, n, [7]), 0
    for step in range(2 * n):
        paths = MergedPaths(7)
        column = window.add_to(paths, 0)
        largest = max(largest, len(window.levels[0]) + sum(map(len, window.levels[1:])))
        assert max(0, *paths.parents) < len(paths.tokens)
        found = window.advance(7, [100 * step + i for i in range(len(column))])
        assert len(found) == (columns if step >= n - 2 else 0)
        assert all(len(phrase) == n - 1 for _, phrase in found)
    assert largest == JacobiWindow.most_nodes(columns, n)


def test_an_ngram_is_a_column_of_passes():
    window = JacobiWindow(2, 3, [5])
    assert window.levels == [[5, 5]] and window.depth == 2
    assert window.advance(1, [10, 11, 12]) == [] and window.levels == [[5], [11, 12]]
    assert window.advance(2, [20, 21]) == [(2, [11, 20]), (5, [12, 21])]
    assert window.levels == [[12], [20, 21]]
