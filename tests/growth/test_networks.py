"""What the networks of the core draft, and what they refuse; tests/drafters compares them with their papers."""

import pytest
import torch
from torch.nn.functional import silu

from specengine import _C
from tests.growth.networks import NETWORKS, NOTHING, drafted, layers, native, weights_of
from tests.ops.arguments import decoder, projection, randn

ALL = {"children": 20, "limits": [3, 3], "nodes": 256}  # every token of the head
SECOND = 1, 5, 8  # the second request, and its rows


def alone(name):
    """The arguments of the second request's draft, in memory of its own."""
    arguments = NETWORKS[name]()
    count = len(arguments["runs"][0])
    own = {key: arguments[key][1:] for key in ("runs", "pages", "cached", "limits")}
    return own | {"rows": arguments["rows"][count:]}


def levels_of(tree, children):
    """Tokens and chances of a backbone, level by level."""
    tokens, _, chances = tree
    starts = range(1, len(tokens), children)
    return [(torch.tensor(tokens[i : i + children]), torch.tensor(chances[i : i + children])) for i in starts]


def dense(rows, columns, seed):
    """What projection(rows, columns, seed) multiplies with, and adds."""
    packed = randn(-(-rows // 16), columns, 16, seed=seed)
    return packed.transpose(1, 2).reshape(-1, columns)[:rows], randn(rows, seed=seed)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_request_gets_the_same_tree_alone_as_beside_another_and_with_any_instruction_set(name):
    (first, second), levels = drafted(name)
    assert levels == NETWORKS[name]()["levels"] and first != second
    ((own,), _) = drafted(name, **alone(name))
    assert own == second
    best = _C.instruction_set()
    try:
        for other in _C.instruction_sets:
            _C.set_instruction_set(other)
            for (tokens, parents, chances), ours in zip(drafted(name)[0], (first, second), strict=True):
                assert (tokens, parents) == ours[:2], other
                assert chances == pytest.approx(ours[2], rel=1e-4), other
    finally:
        _C.set_instruction_set(best)


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "heads"])
def test_children_are_all_tokens_likeliest_first_and_their_chances_sum_to_one(name):
    (tree, _), _ = drafted(name, **ALL, beam=1, levels=1)
    ((tokens, chances),) = levels_of(tree, 20)
    assert sorted(tokens.tolist()) == [*range(5, 25)] and tree[1] == [-1] + [0] * 20
    assert (chances[:-1] >= chances[1:]).all() and chances.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_tree_of_fewer_levels_is_the_beginning_of_one_of_more(name):
    whole, _ = drafted(name)
    for tree, part in zip(whole, drafted(name, levels=1)[0], strict=True):
        count = len(part[0])
        assert [column[:count] for column in tree] == list(part) and 1 < count < len(tree[0])
    for tree, part in zip(whole, drafted(name, limits=[1, 0])[0], strict=True):
        assert [column[: len(part[0])] for column in tree] == list(part)
    assert len(part[0]) == 1


@pytest.mark.parametrize(
    "name", [name for name in NETWORKS if name not in ("heads", "fasteagle")]
)  # levels for nothing
def test_no_level_is_drafted_that_is_expected_to_add_too_few_tokens(name):
    beam, levels = (NETWORKS[name]()[key] for key in ("beam", "levels"))
    whole, _ = drafted(name, limits=[levels] * 2)
    shares = []
    for depth in range(1, levels):
        total = 0.0
        for _, parents, chances in whole:
            reach, depths = [1.0], [0]
            for parent, chance in zip(parents[1:], chances[1:], strict=True):
                reach.append(reach[parent] * chance)
                depths.append(depths[parent] + 1)
            found = sorted(r for r, d in zip(reach, depths, strict=True) if d == depth)
            total += min(1.0, sum(found[-beam:])) ** (1 + 1 / depth)
        shares.append(total)
    for gain in [factor * share for share in shares for factor in (1.001, 0.999)]:
        expected = next((depth for depth, own in enumerate(shares, start=1) if own < gain), levels)
        assert drafted(name, min_gain=gain)[1] == expected


@pytest.mark.parametrize("name", ["heads", "fasteagle"])
def test_levels_whose_logits_are_known_at_once_are_all_drafted(name):
    assert drafted(name, min_gain=100.0) == drafted(name)


def test_the_best_nodes_are_kept_and_those_that_are_seldom_reached_are_left_out():
    def reaches(tree):
        reach = [1.0]
        for parent, chance in zip(tree[1][1:], tree[2][1:], strict=True):
            reach.append(reach[parent] * chance)
        return reach

    (whole, _), _ = drafted("eagle")
    every = sorted(reaches(whole)[1:])
    least = every[len(every) // 2] * 1.0001
    for part in (drafted("eagle", min_reach=least), drafted("eagle", nodes=1 + sum(r >= least for r in every))):
        kept = [node for node, reach in enumerate(reaches(whole)) if reach >= least]
        assert part[0][0][0] == [whole[0][node] for node in kept] and 1 < len(kept) < len(whole[0])


def test_a_node_has_as_many_children_as_its_class():
    (whole, _), _ = drafted("glide", limits=[3, 3])
    tops = [chances[0].item() for _, chances in levels_of(whole, 3)]
    thresholds = [sorted(tops)[0] * 1.01, sorted(tops)[1] * 1.01]
    (tree, _), _ = drafted("glide", limits=[3, 3], thresholds=thresholds, widths=(3, 2, 1))
    widths = [3 - sum(top > bound for bound in thresholds) for top in tops]
    assert sorted(widths) == [1, 2, 3]
    kept = zip(levels_of(whole, 3), widths, strict=True)
    assert tree[0][1:] == [token for (tokens, _), width in kept for token in tokens[:width]]


def test_every_head_adds_its_blocks_and_reads_its_logits():
    every = [(level, rank) for level in range(3) for rank in range(20)]
    ranks = {"ranks": [rank for _, rank in every], "depths": [1 + level for level, _ in every]}
    parents = [0 if level == 0 else 1 + (level - 1) * 20 for level, _ in every]
    trees, _ = drafted("heads", **ALL, **ranks, parents=parents)

    def product(x, rows, seed):
        weight, bias = dense(rows, 6, seed)
        return x @ weight.T + bias

    x = randn(3, 6)[[2, 1]]
    first, third = x + silu(product(x, 6, 1)), x + silu(product(x, 6, 2))
    third = third + silu(product(third, 6, 2))
    for level, logits in enumerate([product(first, 20, 8), product(x, 20, 7), product(third, 20, 7)]):
        for own, tree in zip(logits.softmax(-1), trees, strict=True):
            tokens, chances = levels_of(tree, 20)[level]
            torch.testing.assert_close(chances, own[tokens - 5], atol=1e-5, rtol=1e-4)


def test_a_level_depends_on_the_token_above_by_the_markov_head_alone():
    none = {"markov_rank": 0, "markov_tokens": None, "markov_head": NOTHING}
    ours, plain = (drafted("fasteagle halves", **ALL, **change)[0] for change in ({}, none))
    weight, bias = dense(20, 4, 8)
    tokens = randn(2, 4, 16).transpose(1, 2).reshape(32, 4)
    for one, other in zip(ours, plain, strict=True):
        (best, _), (after, after_chances) = levels_of(one, 20)
        (same, _), (before, before_chances) = levels_of(other, 20)
        assert best.equal(same)
        logits = torch.empty(20).scatter(0, before - 5, before_chances.log()) + weight @ tokens[best[0] - 5] + bias
        found = torch.empty(20).scatter(0, after - 5, after_chances)
        torch.testing.assert_close(found, logits.softmax(-1), atol=1e-5, rtol=1e-3)


def test_what_the_target_cached_matters_by_its_projections_alone():
    own, (k, v, *tables) = NETWORKS["glide"]()["caches"]
    other = {"caches": (own, (k, randn(*v.shape, seed=17), *tables))}
    assert drafted("glide", **other) != drafted("glide")
    plain = {"queries": (), "outs": ()}
    assert drafted("glide", **plain, **other) == drafted("glide", **plain)


@pytest.mark.parametrize("name", ["eagle fused", "fasteagle", "heads"])
def test_the_rows_of_hidden_states_may_lie_anywhere_and_states_side_by_side_are_one_row(name):
    arguments = NETWORKS[name]()
    states = arguments["hidden_states"]
    mixed, rows = states.flip(0), [len(states) - 1 - row for row in arguments["rows"]]
    assert drafted(name, hidden_states=mixed, rows=rows) == drafted(name)
    assert drafted(name, hidden_states=mixed) != drafted(name)
    assert drafted(name, hidden_states=states.flatten(1)) == drafted(name)
    with pytest.raises(ValueError, match="hidden_states: expected"):
        drafted(name, hidden_states=states.mT.contiguous().mT)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_leads_to_no_distribution_is_refused(name):
    arguments = NETWORKS[name]()
    cause = "runs" if name == "glide" else "hidden_states"
    spoiled = "embedding" if name == "glide" else "hidden_states"
    with pytest.raises(ValueError, match=f"^{cause}: level 0 has no distribution; logits: NaN"):
        drafted(name, **{spoiled: arguments[spoiled] * torch.nan})


WRONG = [
    ("eagle", {"rows": [0]}, "rows: expected shape"),
    ("eagle", {"rows": [0, 1, 2, 3, 4, 5, 6, 9]}, "rows: entry 7 is 9, expected 0 to 8"),
    ("eagle", {"runs": [[0, 1, -1, 3, 4], [5, 6, 7]]}, "runs: entry 2 is -1, expected 0 to 31"),
    ("eagle", {"runs": [[0, 1, 2, 3, 4, 5, 6, 7], []]}, "runs: request 1 has no token"),
    ("eagle", {"pages": [[0]]}, "pages: expected 2 of them, one per request, got 1"),
    ("eagle", {"pages": [[-1, 0], [1]]}, "block_table: page -1 of request 0"),
    ("eagle", {"cached": [0]}, "cached: expected 2 of them, one per request, got 1"),
    ("eagle", {"cached": [-1, 0]}, "lengths: entry 0 is negative"),
    ("eagle", {"cached": [100_000, 2]}, "block_table: request 0 needs"),
    ("eagle", {"limits": [1]}, "limits: expected 2 numbers, one per request, got 1"),
    ("eagle", {"limits": [1, -1]}, "limits: entry 1 is negative"),
    ("eagle", {"levels": 0}, "levels: expected 1 to 256, got 0"),
    ("eagle", {"levels": 2**62}, "levels: expected 1 to 256, got 4611686018427387904"),
    ("eagle", {"levels": 129}, "levels: 129 of beam=2 expand 257 nodes, at most 256"),
    ("eagle", {"levels": 90}, r"block_table: request \d needs \d+ pages"),
    ("eagle", {"levels": 7, "children": 20, "beam": 20}, "levels: 7 of them have 2421 candidates, at most 2048"),
    ("eagle", {"children": 21}, "children: expected 1 to 20, got 21"),
    ("eagle", {"children": 0}, "children: expected 1 to 255, got 0"),
    ("eagle", {"beam": 0}, "beam: expected 1 to children=3, got 0"),
    ("eagle", {"beam": 4}, "beam: expected 1 to children=3, got 4"),
    ("eagle", {"nodes": 0}, "nodes: expected 1 to 256, got 0"),
    ("eagle", {"hidden_states": randn(9, 7)}, "hidden_states: expected 6 columns, got 7"),
    ("eagle", {"hidden_states": None}, "hidden_states: expected a tensor, got None"),
    ("eagle", {"caches": ()}, "caches: expected 1 of them, got 0"),
    ("eagle", {"beam": 1, "parents": [0], "depths": [1], "ranks": [0]}, "ranks: expected a network that knows all"),
    ("fasteagle", {"levels": 3}, "levels: expected at most 2, one per layer, got 3"),
    ("fasteagle", {"beam": 2}, "beam: expected 1 of layers that are a chain, got 2"),
    ("fasteagle", {"children": 21}, "children: expected 1 to 20, got 21"),
    ("fasteagle", {"hidden_states": randn(9, 3, 6)}, "fuse: expected shape .* with C=24"),
    ("fasteagle", {"hidden_states": randn(9, 2, 7)}, "hidden_states: expected states of 6 columns each, got 14"),
    ("fasteagle", {"cached": [0, 200]}, "block_table: request 1 needs"),
    ("heads", {"levels": 4, "limits": [4, 4]}, "levels: expected at most 3, one per head, got 4"),
    ("heads", {"hidden_states": randn(3, 7)}, "hidden_states: expected 6 columns, got 7"),
    ("heads", {"rows": [3, 1]}, "rows: entry 0 is 3, expected 0 to 2"),
    ("heads", {"ranks": (0, 2, 1, 0, 3)}, "ranks: node 4 has rank 3 of 3"),
    ("heads", {"parents": (0, 0, 1, 4, 3)}, "parents: node 3 has parent 4"),
    ("heads", {"depths": (1, 1, 2, 2, 2)}, "depths: node 4 has depth 2, expected one below its parent"),
    ("heads", {"depths": (1, 1, 2)}, "ranks: expected a parent, a depth and a rank of each node"),
    ("glide", {"hidden_states": randn(9, 6)}, "hidden_states: expected None"),
    ("glide", {"beam": 2}, "beam: expected 1 of a network that reads chains, got 2"),
    ("glide", {"runs": [[0, 1, 2, 3, 4], [6]], "cached": [61, 0]}, "cached: request 1 has its root alone"),
    ("glide", {"runs": [[0], [-5]]}, "runs: entry 1 is -5, expected 0 to"),
    ("glide", {"caches": NETWORKS["eagle"]()["caches"]}, "caches: expected 2 of them, got 1"),
    ("glide", {"widths": (4,)}, "widths: expected 1 to children=3, got 4"),
    ("glide", {"widths": (3, 2), "thresholds": ()}, "widths: expected one more than thresholds, or neither"),
    ("glide", {"widths": (3, 2, 1), "thresholds": (0.5, 0.5)}, "thresholds: expected ascending numbers"),
]


@pytest.mark.parametrize("name, changes, message", WRONG)
def test_wrong_arguments_are_named(name, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        drafted(name, **changes)


def test_nothing_is_written_before_all_slots_and_positions_are_checked():
    """The slots of all expanded nodes need pages; the pairs alone would fit."""
    arguments = NETWORKS["eagle"]()
    ((k, v, cos, sin),) = arguments["caches"]
    k, v = torch.zeros_like(k), torch.zeros_like(v)
    place = {"pages": [[0], [1]], "cached": [0, 58], "caches": ((k, v, cos, sin),)}
    with pytest.raises(ValueError, match="block_table: request 1 needs 2 pages for 65 slots"):
        drafted("eagle", **place)
    short = (k, v, cos[:62], sin[:62])
    with pytest.raises(ValueError, match="cached: position 62 is past the 62 rows of cos"):
        drafted("eagle", **{**place, "pages": [[0, 2], [1, 3]], "caches": (short,)})
    assert not k.any() and not v.any()
    drafted("eagle", **place, levels=2)
    assert k.any() and v.any()


WEIGHTS = [
    ("eagle", {"decoder": _C.Decoder(**decoder())}, "decoder: expected the last layer's output"),
    ("eagle", {"embedding": None}, "embedding: expected a tensor, got None"),
    ("eagle", {"embedding_norm": torch.zeros(3)}, "embedding_norm: expected shape"),
    ("eagle", {"hidden_state_norm": None}, "hidden_state_norm: expected a tensor, got None"),
    ("eagle", {"embedding_norm": None}, "embedding_norm: expected a tensor, got None"),
    ("eagle", {"head": projection(20, 7, 7)}, "head: expected shape"),
    ("eagle", {"vocabulary": torch.zeros(5, dtype=torch.int32)}, "vocabulary: expected shape"),
    ("eagle", {"vocabulary": torch.full((20,), 32, dtype=torch.int32)}, "vocabulary: entry 0 is 32, expected 0 to 31"),
    ("eagle joined", {"fuse": projection(6, 6, 9)}, "fuse: expected shape .* with .*C=12"),
    ("eagle joined", {"fuse": NOTHING}, "fuse: expected one row count per weight"),
    ("eagle joined", {"decoder": NETWORKS["eagle"]()["decoder"]}, "decoder: expected first_columns=0, got 12"),
    ("eagle joined", {"before_residual": True}, "before_residual: expected false without first_columns"),
    ("eagle joined", {"feed_back": True}, "feed_back: expected false without hidden_state_norm"),
    ("eagle predicting", {"fuse": NOTHING}, "fuse: expected one row count per weight"),
    ("fasteagle", {"decoder": _C.Decoder(**decoder())}, "decoder: expected every layer's output"),
    ("fasteagle", {"embedding": None}, "embedding: expected a tensor, got None"),
    ("fasteagle", {"embedding_norm": randn(6)}, "embedding_norm: expected no norms"),
    ("fasteagle", {"fuse": projection(7, 18, 9)}, "fuse: expected 6 rows"),
    ("fasteagle", {"fuse": NOTHING}, "fuse: expected 6 rows"),
    ("fasteagle", {"head": projection(20, 7, 7)}, "head: expected shape"),
    ("fasteagle", {"head_norm": torch.zeros(3)}, "head_norm: expected shape"),
    ("fasteagle", {"vocabulary": torch.zeros(5, dtype=torch.int32)}, "vocabulary: expected shape"),
    ("fasteagle", {"markov_head": projection(20, 4, 8)}, "markov_rank: expected columns"),
    ("fasteagle", {"markov_rank": -1}, "markov_rank: expected 0 or more, got -1"),
    ("fasteagle halves", {"hidden_state_norm": None}, "hidden_state_norm: expected a tensor, got None"),
    ("fasteagle halves", {"markov_rank": 5}, "markov_tokens: expected shape"),
    ("fasteagle halves", {"markov_tokens": randn(1, 4, 16)}, "markov_tokens: expected 20 rows"),
    ("fasteagle halves", {"markov_head": projection(19, 4, 8)}, "markov_head: expected 20 rows, got 19"),
    (
        "fasteagle halves",
        {"decoder": native((1, 2), first_columns=18, **layers(attention_norm=None, qkv=projection(64, 18, 1)))},
        "decoder: expected first_columns=0 or 12, got 18",
    ),
    ("heads", {"hidden": 0}, "hidden: expected 1 to"),
    ("heads", {"heads": ()}, "heads: expected at least one"),
    (
        "heads",
        {"heads": (_C.DraftHead([projection(7, 6, 1)], projection(20, 6, 7)),)},
        "heads: head 0: blocks: expected 6 rows, got 7",
    ),
    (
        "heads",
        {"heads": [_C.DraftHead((), projection(rows, 6, 7)) for rows in (20, 19)]},
        "heads: head 1: logits: expected 20 rows, got 19",
    ),
    ("heads", {"vocabulary": torch.full((20,), -1, dtype=torch.int32)}, "vocabulary: entry 0 is -1"),
    ("glide", {"decoder": _C.Decoder(**decoder())}, "decoder: expected one without first_columns"),
    ("glide", {"embedding": None}, "embedding: expected a tensor, got None"),
    ("glide", {"embedding_rows": 33}, "embedding_rows: expected 1 to 32, got 33"),
    ("glide", {"queries": ()}, "queries: expected one of each layer"),
    ("glide", {"queries": (projection(20, 6, 1),) * 2}, "queries: expected 24 rows, got 20"),
    ("glide", {"outs": (projection(6, 20, 1),) * 2}, "outs: expected shape"),
    ("glide", {"target_heads": 0}, "target_heads: expected 1 to"),
    ("glide", {"target_head_dim": 3}, "target_head_dim: expected an even number"),
    ("glide", {"reach": -1}, "reach: expected 0"),
    ("glide", {"block": 0}, "block: expected a positive number of tokens, got 0"),
    ("glide", {"head": projection(20, 7, 7)}, "head: expected shape"),
    ("glide", {"vocabulary": torch.zeros(5, dtype=torch.int32)}, "vocabulary: expected shape"),
]


@pytest.mark.parametrize("name, changes, message", WEIGHTS)
def test_a_network_refuses_weights_that_do_not_fit(name, changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        weights_of(name, {**NETWORKS[name](), **changes})


def test_fetching_weights_ahead_changes_nothing_and_outlives_them():
    expected = drafted("eagle")
    threads = _C.num_threads()
    try:
        for count in (1, 2, 3):
            _C.set_num_threads(count)
            weights = weights_of("eagle", NETWORKS["eagle"]())
            for _ in range(20):
                weights.fetch()
                assert drafted("eagle") == expected
            weights.fetch()
            del weights  # the workers may still fetch
    finally:
        _C.set_num_threads(threads)
