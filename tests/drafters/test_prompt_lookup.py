from types import SimpleNamespace

import pytest

from specengine.drafters.prompt_lookup import Config, PromptLookup


def draft(tokens, *, limit=100, **options):
    sequence = SimpleNamespace(tokens=tokens, draft_limit=limit, drafter_state=None)
    (tree,) = PromptLookup(Config(**options), None, None).draft([sequence])
    return tree


def paths(tree):
    """Root-to-leaf token paths, root left out."""
    leaves = set(range(len(tree.tokens))) - set(tree.parents)
    result = []
    for node in sorted(leaves):
        path = []
        while node:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        result.append(path[::-1])
    return result


def test_continuations_are_merged_into_one_tree_newest_first():
    tree = draft([1, 2, 3, 9, 1, 2, 4, 1, 2], min_ngram=2, max_ngram=2, nodes=16, length=3)
    assert tree.tokens[0] == 2 and tree.parents[0] == -1
    assert paths(tree) == [[4, 1, 2], [3, 9, 1]]


def test_the_longest_match_comes_first():
    tree = draft([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2], min_ngram=2, max_ngram=3, nodes=2)
    assert paths(tree) == [[5]]  # 7 1 2 -> 5 beats the newer 1 2 -> 6


def test_common_beginnings_share_nodes():
    tree = draft([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], min_ngram=2, max_ngram=2, nodes=16, length=2)
    assert paths(tree) == [[3, 5], [3, 4]]
    assert len(tree.tokens) == 4


def test_the_budget_counts_the_root():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert len(draft(tokens, nodes=5).tokens) == 5
    assert len(draft(tokens, nodes=5, length=2).tokens) == 3


def test_nothing_is_drafted_without_a_match_or_a_use():
    assert draft([1, 2, 3, 4]).tokens == [4]
    assert draft([5]).tokens == [5]
    assert draft([1, 2, 3, 1, 2], limit=0).tokens == [2]


def test_the_limit_bounds_the_depth():
    assert paths(draft([1, 2, 3, 4, 5, 1, 2], limit=2)) == [[3, 4]]


def test_a_repeated_token_is_drafted_as_a_run():
    # the newest match leaves one token to copy, older ones extend it
    assert paths(draft([9] * 6, nodes=4)) == [[9, 9, 9]]


def test_the_index_grows_with_the_sequence():
    sequence = SimpleNamespace(tokens=[1, 2, 3], draft_limit=9, drafter_state=None)
    drafter = PromptLookup(Config(), None, None)
    assert drafter.draft([sequence])[0].tokens == [3]
    sequence.tokens += [1, 2]
    whole = SimpleNamespace(tokens=list(sequence.tokens), draft_limit=9, drafter_state=None)
    assert drafter.draft([sequence]) == drafter.draft([whole])
    assert paths(drafter.draft([sequence])[0]) == [[3, 1, 2]]


def test_the_tree_shrinks_where_nothing_is_accepted_and_grows_back():
    tokens = [*range(1, 20), 1, 2]
    sequence = SimpleNamespace(tokens=tokens, draft_limit=100, drafter_state=None)
    drafter = PromptLookup(Config(nodes=12), None, None)
    sizes = []
    for accepted in [0] * 12 + [9] * 6:
        (tree,) = drafter.draft([sequence])
        sizes.append(len(tree.tokens))
        drafter.observe([sequence], [[0] * (accepted + 1)], None)
    assert sizes[0] == 12 and sizes[12] == 2 and sizes[-1] == 12
    assert sizes[:13] == sorted(sizes[:13], reverse=True)


def test_a_fixed_tree_does_not_shrink():
    sequence = SimpleNamespace(tokens=[*range(1, 20), 1, 2], draft_limit=100, drafter_state=None)
    drafter = PromptLookup(Config(nodes=12, adaptive=False), None, None)
    for _ in range(9):
        (tree,) = drafter.draft([sequence])
        assert len(tree.tokens) == 12
        drafter.observe([sequence], [[0]], None)


@pytest.mark.parametrize(
    "options", [{"nodes": 1}, {"nodes": 257}, {"min_ngram": 0}, {"min_ngram": 5, "max_ngram": 4}, {"length": 0}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options)) if len(options) == 1 else "min_ngram"):
        Config(**options)
