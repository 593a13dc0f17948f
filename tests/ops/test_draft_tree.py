"""What the one call that drafts a tree stops at and refuses; what it drafts is in tests/drafters/test_eagle.py."""

import math

import pytest
import torch

from specengine import _C
from specengine.cache.kv_cache import CacheBatch
from specengine.ops.draft_tree import Thresholds
from tests.drafters.eagle_bench import PROMPTS, Bench, spec_of
from tests.ops.arguments import WEIGHTS, decoder, draft_tree, draft_tree_joined, projection


WHOLE = Thresholds()


class Call:
    """A draft of two requests whose arguments can be changed."""

    def __init__(self, tmp_path, monkeypatch, options="top_k=2,levels=3,beam=2"):
        bench = Bench(spec_of(tmp_path), PROMPTS[2:], f"{options},adaptive=false")
        self.drafter, requests = bench.drafter, bench.requests
        self.runs, picked, self.place = self.drafter.pairs.take_all_runs(requests)
        self.hidden_states = self.drafter.network.native_hidden_states(picked)
        self.limits = [3, 3]
        native = _C.draft_tree
        self.change = lambda arguments: arguments
        monkeypatch.setattr(_C, "draft_tree", lambda *rest: native(*self.change(list(rest))))

    def __call__(self, least=WHOLE, levels=3):
        network, place = self.drafter.network, (self.place, self.drafter.pairs.pool)
        draft = self.drafter._tree_draft
        return draft(self.runs, self.hidden_states, *place, network.cos_sin, self.limits, levels, least)


@pytest.fixture
def call(tmp_path, monkeypatch):
    return Call(tmp_path, monkeypatch)


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
def test_no_level_is_drafted_that_is_expected_to_add_too_few_tokens(tmp_path, monkeypatch, beam):
    call = Call(tmp_path, monkeypatch, f"top_k=2,levels=3,beam={beam}")
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
            assert call(Thresholds(level_tokens=gain))[1] == expected
    assert len({call(Thresholds(level_tokens=factor * min(shares)))[1] for factor in (0.5, 1.01)}) == 2


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
    table, lengths = call.place.block_table, call.place.lengths
    rows = [len(run) for run in call.runs]
    hidden_states, runs = call.hidden_states, call.runs
    for b, states in enumerate(hidden_states.split(rows)):
        call.runs, call.hidden_states, call.limits = [runs[b]], states, [3]
        call.place = CacheBatch(table[b : b + 1], lengths[b : b + 1])
        ((alone,), _) = call()
        assert alone == expected[b]


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
        ({"fuse": _C.Projection((), (), None)}, "fuse: expected one row count per weight"),
        ({"decoder": draft_tree()["decoder"]}, "decoder: expected first_columns=0, got 12"),
        ({"before_residual": True}, "before_residual: expected false without hidden_state_norm"),
        ({"feed_back": True}, "feed_back: expected false without hidden_state_norm"),
    ],
)
def test_a_network_without_norms_refuses_what_does_not_fit(changes, message):
    arguments = draft_tree_joined()
    with pytest.raises(ValueError, match=f"^{message}"):
        _C.EagleWeights(**{name: arguments[name] for name in WEIGHTS} | changes)


ARGUMENTS = ["weights", "tokens", "hidden_states", "cache", "cos", "sin", "levels", "top_k", "beam"]
ARGUMENTS += ["min_level_tokens", "min_reach", "limits", "trees"]
RECORDS = [ARGUMENTS.index("cache"), ARGUMENTS.index("trees")]


@pytest.mark.parametrize(
    "name, wrong, message",
    [
        ("tokens", torch.full((2,), 999, dtype=torch.int32), "tokens: entry 0 is 999"),
        ("tokens", torch.zeros(2, dtype=torch.int64), "tokens: expected .*int32"),
        ("hidden_states", torch.zeros(2, 3), "fuse: expected shape .* with C=3"),
        ("lengths", torch.full((2,), 100_000, dtype=torch.int32), "block_table: request 0 needs"),
        ("row_start", torch.tensor([0, 2, 2], dtype=torch.int32), "row_start: request 1 has no pair"),
        ("first_node", 1, "first_node: expected 0, got 1"),
        ("cos", torch.zeros(1, 8), "lengths: position"),
        ("levels", 0, "levels: expected 1 to 256, got 0"),
        ("levels", 2**62, "levels: expected 1 to 256, got 4611686018427387904"),
        ("levels", 129, "levels: 129 of beam=2 expand 257 nodes, at most 256"),
        ("top_k", 0, "top_k: expected 1 to 48, got 0"),
        ("top_k", 49, "top_k: expected 1 to 48, got 49"),
        ("beam", 0, "beam: expected 1 to top_k=2, got 0"),
        ("beam", 3, "beam: expected 1 to top_k=2, got 3"),
        ("limits", torch.tensor([1, -1], dtype=torch.int32), "limits: entry 1 is negative"),
        ("chances", torch.zeros(2, 3), "trees.chances: expected shape"),
        ("node_counts", torch.zeros(3, dtype=torch.int32), "trees.node_counts: expected shape"),
        ("parents", torch.zeros(2, 0, dtype=torch.int32), "trees.parents: expected shape"),
    ],
)
def test_wrong_arguments_are_named(call, name, wrong, message):
    def change(arguments):
        if name in ARGUMENTS:
            arguments[ARGUMENTS.index(name)] = wrong
            if name == "cos":  # its pair has the same shape
                arguments[ARGUMENTS.index("sin")] = wrong
        for place in RECORDS:
            if name in arguments[place]._fields and name not in ARGUMENTS:
                arguments[place] = arguments[place]._replace(**{name: wrong})
        return arguments

    call.change = change
    with pytest.raises(ValueError, match=message):
        call()


def test_too_many_candidates_are_refused(call):
    def change(arguments):
        for name, value in (("levels", 6), ("top_k", 40), ("beam", 40)):
            arguments[ARGUMENTS.index(name)] = value
        return arguments

    call.change = change
    with pytest.raises(ValueError, match="levels: 6 of them have 8041 candidates, at most 2048"):
        call()


def test_a_draft_past_the_pages_of_a_request_is_refused(call):
    call.place = CacheBatch(call.place.block_table[:, :1].contiguous(), call.place.lengths + 64)
    with pytest.raises(ValueError, match="block_table: request 0 needs"):
        call()


def test_the_slots_of_all_expanded_nodes_need_pages(call):
    """Before anything is written; the tree itself would have fitted."""
    call.place = CacheBatch(call.place.block_table[:, :1].contiguous(), torch.tensor([23, 60], dtype=torch.int32))
    with pytest.raises(ValueError, match="block_table: request 1 needs 2 pages for 65 slots"):
        call()
    call(levels=2)


def test_hidden_states_that_are_no_numbers_are_refused(call):
    call.hidden_states = call.hidden_states * math.nan
    with pytest.raises(ValueError, match="hidden_states: level 0 has no distribution; logits: NaN"):
        call()
