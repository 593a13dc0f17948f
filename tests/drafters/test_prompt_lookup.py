from types import SimpleNamespace

import pytest

from specengine._C import LONGEST_MATCH
from specengine.draft_policy.cost_model import CycleCosts
from specengine.drafters.prompt_lookup.drafter import Config, PromptLookup
from specengine.ops import native
from tests.drafters.leaf_paths import paths
from tests.drafters.steady import steady

FREE = CycleCosts({1: 1.0, 64: 1.0})
CHEAP = CycleCosts({1: 1.0, 2: 1.15, 4: 1.4, 8: 2.2, 16: 4.0, 32: 7.5})
DEAR = CycleCosts({1: 1.0, 64: 64.0})
LOOP = [*range(1, 20)]

TARGET = SimpleNamespace(ops=native)  # all that a drafter with costs of its own asks of a target


def sequence_of(tokens, limit=100):
    return SimpleNamespace(tokens=list(tokens), draft_limit=limit, drafter_states={})


def drafter_of(costs=CHEAP, **options):
    return steady(PromptLookup(Config(**options), None, TARGET, costs))


def draft(tokens, *, limit=100, **options):
    (tree,) = drafter_of(adaptive=False, **options).draft([sequence_of(tokens, limit)]).trees
    return tree


def say(drafter, request, tokens):
    """Returns tree sizes while the target commits `tokens`, one per cycle, whichever of them were drafted."""
    sizes = []
    for token in tokens:
        draft = drafter.draft([request])
        sizes.append(len(draft.trees[0].tokens))
        request.tokens.append(token)
        drafter.observe(draft, [[token]], None)
    return sizes


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


def test_likelier_nodes_come_first():
    tokens = [1, 2, 3, 4, 5, 9, 3, 7, 8, 1, 2, 3]  # 1 2 3 -> 4 5, 3 -> 7 8
    tree = draft(tokens, min_ngram=1, nodes=16, length=2)
    assert tree.tokens == [3, 4, 5, 7, 8] and tree.parents == [-1, 0, 1, 0, 3]


def test_the_index_grows_with_the_sequence():
    request, drafter = sequence_of([1, 2, 3], 9), drafter_of(adaptive=False)
    assert drafter.draft([request]).trees[0].tokens == [3]
    request.tokens += [1, 2]
    assert drafter.draft([request]).trees == drafter.draft([sequence_of(request.tokens, 9)]).trees
    assert paths(drafter.draft([request]).trees[0]) == [[3, 1, 2]]


def test_free_rows_give_the_full_tree_and_dear_ones_the_root_alone():
    repeating = LOOP * 4
    assert say(drafter_of(FREE), sequence_of(repeating), LOOP * 2) == [16] * 38
    assert say(drafter_of(DEAR), sequence_of(repeating), LOOP * 2) == [1] * 38


def test_text_that_never_repeats_drafts_nothing():
    assert say(drafter_of(FREE), sequence_of(range(100)), range(100, 200)) == [1] * 100


PAIRS = [token for i in range(20) for token in (100 + i, 200 + i, 300 + i)]  # 100 + i is followed by 200 + i


def kept_and_broken(kept, count, first):
    """Repeats 100 + i, followed by 200 + i where `kept`, otherwise by new tokens; only new tokens follow new ones."""
    return [
        token
        for n in range(first, first + count)
        for token in (100 + n % 20, 200 + n % 20 if kept else 1000 + n, 5000 + n)
    ]


def test_the_tree_shrinks_to_the_root_where_matches_mislead_and_grows_back_without_a_probe():
    drafter, request = drafter_of(), sequence_of(PAIRS)
    assert say(drafter, request, [9, 100])[-1] == 1
    assert len(drafter.draft([request]).trees[0].tokens) > 1
    say(drafter, request, [9])
    sizes = say(drafter, request, kept_and_broken(False, 40, first=0))
    assert sizes[-30:] == [1] * 30
    sizes = say(drafter, request, kept_and_broken(True, 60, first=40))
    assert max(sizes[-3:]) > 1  # nothing was drafted meanwhile: what would have been is what counts


def test_what_one_request_accepts_is_where_the_next_one_starts():
    drafter, asked = drafter_of(), [*PAIRS, 9, 100]
    (naive,) = drafter.draft([sequence_of(asked)]).trees
    say(drafter, sequence_of(PAIRS), kept_and_broken(False, 60, first=0))
    (taught,) = drafter.draft([sequence_of(asked)]).trees
    assert len(taught.tokens) == 1 < len(naive.tokens)


def test_equal_observations_give_equal_trees():
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5] * 3
    first, second = (say(drafter_of(), sequence_of(text[:40]), text[40:]) for _ in range(2))
    assert first == second and len(set(first)) > 2


def test_several_tokens_committed_at_once_are_learned_like_one_after_the_other():
    at_once, drafter = sequence_of(LOOP * 3), drafter_of(adaptive=False)
    draft = drafter.draft([at_once])
    at_once.tokens += LOOP[:5]
    drafter.observe(draft, [LOOP[:5]], None)
    one_by_one, other = sequence_of(LOOP * 3), drafter_of(adaptive=False)
    say(other, one_by_one, LOOP[:5])
    assert drafter.acceptance.rates() == other.acceptance.rates()


def test_a_batch_shares_the_rows():
    alone, drafter = sequence_of(LOOP * 4), drafter_of()
    (tree,) = drafter.draft([alone]).trees
    trees = drafter.draft([sequence_of(LOOP * 4) for _ in range(8)]).trees
    assert 1 <= max(len(each.tokens) for each in trees) < len(tree.tokens)
    first, last = drafter.draft([sequence_of(LOOP * 4), sequence_of(range(50))]).trees
    assert len(last.tokens) == 1 < len(first.tokens)


def test_a_fixed_tree_does_not_shrink_and_asks_for_no_costs():
    drafter = PromptLookup(Config(nodes=12, adaptive=False), None, TARGET)
    misled = [token for i in range(9) for token in (1000 + i, 1, 2)]
    assert say(drafter, sequence_of([*LOOP * 4, 1, 2]), misled)[::3] == [12] * 9


def test_a_match_of_any_length_has_a_rate():
    for length in (1, 2, 15, 16, 17, 40):
        (tree,) = (
            drafter_of(FREE, nodes=64, length=63, max_ngram=32).draft([sequence_of([*range(length), 99] * 2)]).trees
        )
        assert tree.tokens[0] == 99
    assert len(drafter_of().acceptance.rates()) == 2 * LONGEST_MATCH.bit_length()


@pytest.mark.parametrize(
    "options", [{"nodes": 1}, {"nodes": 257}, {"min_ngram": 0}, {"min_ngram": 5, "max_ngram": 4}, {"length": 0}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options)) if len(options) == 1 else "min_ngram"):
        Config(**options)
