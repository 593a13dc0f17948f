"""What the one call that drafts a tree stops at and refuses; what it drafts is in tests/drafters/test_eagle.py."""

import math

import pytest
import torch

from specengine import _C
from specengine.ops.draft_tree import WHOLE, Thresholds
from tests.drafters.eagle_bench import PROMPTS, Bench, spec_of
from tests.ops.arguments import WEIGHTS, decoder, draft_tree, draft_tree_joined, ints, projection
from tests.ops.arguments import call as call_op


class Call:
    """A draft of two requests whose arguments can be changed."""

    def __init__(self, tmp_path, options="top_k=2,levels=3,beam=2"):
        bench = Bench(spec_of(tmp_path), PROMPTS[2:], f"{options},adaptive=false")
        self.drafter = bench.drafter
        self.runs, picked, rows, self.cached = self.drafter.pairs.take_unread(bench.requests)
        self.hidden_states, self.rows = self.drafter.network.native_rows(picked, rows)
        self.pages = [request.pages for request in bench.requests]
        self.limits = [3, 3]

    def __call__(self, least=WHOLE, levels=3):
        given = (self.runs, self.hidden_states, self.rows, self.pages, self.cached, self.drafter.pairs.pool)
        return self.drafter._tree_draft(*given, self.drafter.network.cos_sin, self.limits, levels, least)


@pytest.fixture
def call(tmp_path):
    return Call(tmp_path)


def reaches(tree):
    """Of every node, with the depth."""
    reach, depths = [1.0], [0]
    for parent, chance in zip(tree.parents[1:], tree.chances[1:], strict=True):
        reach.append(reach[parent] * chance)
        depths.append(depths[parent] + 1)
    return reach, depths


def test_a_draft_begins_with_the_root_and_has_children_of_falling_chance(call):
    trees, levels = call()
    assert levels == 3
    for tree, run in zip(trees, call.runs, strict=True):
        assert (tree.tokens[0], tree.parents[0], tree.chances[0]) == (run[-1], -1, 1.0)
        assert len(tree.tokens) == 1 + 2 + 4 + 4 and max(reaches(tree)[1]) == 3
        for first in range(1, len(tree.tokens), 2):
            assert tree.parents[first] == tree.parents[first + 1] and tree.chances[first] >= tree.chances[first + 1]


@pytest.mark.parametrize("beam", [1, 2])
def test_no_level_is_drafted_that_is_expected_to_add_too_few_tokens(tmp_path, beam):
    call = Call(tmp_path, f"top_k=2,levels=3,beam={beam}")
    whole, _ = call()
    shares = []
    for depth in (1, 2):
        found = [[r for r, d in zip(*reaches(tree), strict=True) if d == depth] for tree in whole]
        reached = [min(1.0, sum(sorted(own)[-beam:])) for own in found]
        shares.append(sum(r ** (1 + 1 / depth) for r in reached))
    for share in shares:
        for factor in (1.001, 0.999):
            gain = factor * share
            expected = next((depth for depth, own in enumerate(shares, start=1) if own < gain), 3)
            assert call(Thresholds(min_gain=gain))[1] == expected
    assert len({call(Thresholds(min_gain=factor * min(shares)))[1] for factor in (0.5, 1.01)}) == 2


def test_nodes_that_are_seldom_reached_are_left_out(call):
    whole, _ = call()
    all_reaches = sorted(reach for tree in whole for reach in reaches(tree)[0][1:])
    least = all_reaches[len(all_reaches) // 2] * 1.0001
    for tree, part in zip(whole, call(Thresholds(reach=least))[0], strict=True):
        kept = [node for node, reach in enumerate(reaches(tree)[0]) if reach >= least]
        assert list(part.tokens) == [tree.tokens[node] for node in kept] and len(kept) < len(tree.tokens)


def test_every_request_has_its_own_deepest_level(call):
    call.limits = [2, 0]
    (first, second), _ = call()
    assert max(reaches(first)[1]) == 2 and len(second.tokens) == 1


def test_the_bits_do_not_depend_on_the_instruction_set_or_the_requests_beside(call):
    def bits(trees):
        return [(list(tree.tokens), list(tree.parents)) for tree in trees]

    expected, _ = call()
    best = _C.instruction_set()
    try:
        for name in _C.instruction_sets:
            _C.set_instruction_set(name)
            assert bits(call()[0]) == bits(expected), name
    finally:
        _C.set_instruction_set(best)
    whole = call.runs, call.pages, call.cached
    first = 0
    for b, run in enumerate(whole[0]):
        call.runs, call.pages, call.cached = ([own[b]] for own in whole)
        call.rows, call.limits = range(first, first + len(run)), [3]
        first += len(run)
        ((alone,), _) = call()
        assert alone == expected[b]


def test_fetching_weights_ahead_changes_nothing_and_outlives_them(tmp_path):
    expected, _ = Call(tmp_path)()
    threads = _C.num_threads()
    try:
        for count in (1, 2, 3):
            _C.set_num_threads(count)
            call = Call(tmp_path)
            for _ in range(20):
                call.drafter._tree_draft.fetch()
                assert call()[0] == expected
            call.drafter._tree_draft.fetch()
            del call  # the workers may still fetch
    finally:
        _C.set_num_threads(threads)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"decoder": _C.Decoder(**decoder())}, "decoder: expected first_columns=12, got 0"),
        ({"decoder": draft_tree_joined()["decoder"]}, "decoder: expected first_columns=12, got 0"),
        ({"embedding": None}, "embedding: expected a tensor, got None"),
        ({"embedding_norm": torch.zeros(3)}, "embedding_norm: expected shape"),
        ({"hidden_state_norm": None}, "hidden_state_norm: expected a tensor, got None"),
        ({"embedding_norm": None}, "embedding_norm: expected a tensor, got None"),
        ({"head": projection(20, 7, 7)}, "head: expected shape"),
        ({"vocabulary": torch.zeros(5, dtype=torch.int32)}, "vocabulary: expected shape"),
        ({"vocabulary": torch.full((20,), 32, dtype=torch.int32)}, "vocabulary: entry 0 is 32, expected 0 to 31"),
    ],
)
def test_a_network_refuses_what_does_not_fit(changes, message):
    arguments = draft_tree()
    with pytest.raises(ValueError, match=f"^{message}"):
        _C.EagleWeights(**{name: arguments[name] for name in WEIGHTS} | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"fuse": projection(6, 6, 9)}, "fuse: expected shape .* with .*C=12"),
        ({"fuse": _C.Projection((), (), None, None, False)}, "fuse: expected one row count per weight"),
        ({"decoder": draft_tree()["decoder"]}, "decoder: expected first_columns=0, got 12"),
        ({"before_residual": True}, "before_residual: expected false without hidden_state_norm"),
        ({"feed_back": True}, "feed_back: expected false without hidden_state_norm"),
    ],
)
def test_a_network_without_norms_refuses_what_does_not_fit(changes, message):
    arguments = draft_tree_joined()
    with pytest.raises(ValueError, match=f"^{message}"):
        _C.EagleWeights(**{name: arguments[name] for name in WEIGHTS} | changes)


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("lengths", ints(100_000, 2), "block_table: request 0 needs"),
        ("row_start", ints(0, 8, 8), "row_start: request 1 has no pair"),
        ("first_node", 1, "first_node: expected 0, got 1"),
        ("cos", torch.zeros(60, 4), "sin: expected shape"),
        ("levels", 0, "levels: expected 1 to 256, got 0"),
        ("levels", 2**62, "levels: expected 1 to 256, got 4611686018427387904"),
        ("levels", 129, "levels: 129 of beam=2 expand 257 nodes, at most 256"),
        ("levels", 90, r"block_table: request \d needs \d+ pages"),
        ("top_k", 0, "top_k: expected 1 to 20, got 0"),
        ("top_k", 21, "top_k: expected 1 to 20, got 21"),
        ("beam", 0, "beam: expected 1 to top_k=3, got 0"),
        ("beam", 4, "beam: expected 1 to top_k=3, got 4"),
        ("trees.parents", torch.zeros(2, 0, dtype=torch.int32), "trees.parents: expected shape"),
    ],
)
def test_wrong_arguments_are_named(name, wrong, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call_op("draft_tree", {**draft_tree(), name: wrong})


def test_too_many_candidates_are_refused():
    with pytest.raises(ValueError, match="levels: 7 of them have 2421 candidates, at most 2048"):
        call_op("draft_tree", {**draft_tree(), "levels": 7, "top_k": 20, "beam": 20})


def test_states_side_by_side_are_the_columns_of_a_row(call):
    assert call.hidden_states.dim() == 3
    apart = call()
    call.hidden_states = call.hidden_states.flatten(1)
    assert call() == apart
    call.hidden_states = call.hidden_states.view(len(call.hidden_states), -1, 3).mT
    with pytest.raises(ValueError, match="hidden_states: expected shape"):
        call()


def test_the_rows_of_pairs_may_lie_anywhere():
    order = torch.tensor([4, 8, 0, 2, 7, 1, 5, 3])
    plain, mixed = draft_tree(), draft_tree()
    mixed["hidden_states"] = torch.zeros(9, 6)
    mixed["hidden_states"][order] = plain["hidden_states"][:8]
    other = {**draft_tree(), "hidden_states": mixed["hidden_states"]}  # with the first rows
    mixed["rows"] = order.int()
    for arguments in (plain, mixed, other):
        call_op("draft_tree", arguments)
    assert plain["trees.chances"].equal(mixed["trees.chances"])
    assert not plain["trees.chances"].equal(other["trees.chances"])


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("rows", [0], "rows: expected shape"),
        ("rows", range(1 << 20), "rows: expected shape"),
        ("pages", [[0]], "pages: expected 2 lists, one per request, got 1"),
        ("cached", [0], "lengths: expected shape"),
        ("limits", [1, -1], "limits: entry 1 is negative"),
        ("runs", [[], [3]], "rows: expected shape"),
    ],
)
def test_wrong_lists_are_named(call, name, wrong, message):
    setattr(call, name, wrong)
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_a_draft_past_the_pages_of_a_request_is_refused(call):
    call.pages = [[0], [1]]
    call.cached = [64, 64]
    with pytest.raises(ValueError, match="block_table: request 0 needs"):
        call()


def test_the_slots_of_all_expanded_nodes_need_pages(call):
    """Before anything is written; the pairs alone would fit."""
    pool = call.drafter.pairs.pool
    pool.k[:, :2], pool.v[:, :2] = 0, 0  # the cached pairs were never read: used memory may hold anything
    call.pages = [[0], [1]]
    call.cached = [0, 61 - len(call.runs[1]) + 1]
    with pytest.raises(ValueError, match="block_table: request 1 needs 2 pages for 66 slots"):
        call()
    call(levels=2)


def test_hidden_states_that_are_no_numbers_are_refused(call):
    call.hidden_states = call.hidden_states * math.nan
    with pytest.raises(ValueError, match="hidden_states: level 0 has no distribution; logits: NaN"):
        call()
