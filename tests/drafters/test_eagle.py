import json

import pytest
import torch

from specengine import SamplingParams
from specengine.drafters import load_drafter
from tests.drafters.eagle_bench import (
    LAYOUTS,
    OPTIONS,
    PROMPTS,
    Bench,
    candidate_path,
    check_against,
    reading_of,
    spec_of,
)
from tests.drafters.eagle_files import CONFIG, eagle1_state, eagle3_state, write_drafter
from tests.drafters.requests import path_to
from tests.engines import ids, tiny_engine, tiny_model

GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(params=LAYOUTS)
def layout(request, tmp_path):
    """Name of the drafter with its path, and what it should compute."""
    return spec_of(tmp_path, request.param), reading_of(*LAYOUTS[request.param])


@pytest.mark.quick(4)
@pytest.mark.parametrize("beam", [0, 1, 3])
def test_every_distribution_is_that_of_the_published_architecture(layout, beam):
    spec, reading = layout
    bench = Bench(spec, PROMPTS, f"{OPTIONS},beam={beam}")
    check_against(reading, bench)
    bench.commit([[1, 2, 3], [8], [9, 9], [30, 31]])
    check_against(reading, bench)
    for committed in ([[6], [2, 8, 5], [7], [1]], [[5, 4, 3, 2], [1], [2], [3]]):
        bench.commit(committed)
        bench.drafter.draft(bench.requests)
    bench.commit([[6], [2, 8, 5], [7], [1]])
    check_against(reading, bench)


def test_the_rotary_tables_do_not_grow_by_a_row_per_token_past_the_training_texts(tmp_path):
    spec = spec_of(tmp_path, trained_length=9, max_position_embeddings=4096)
    network = Bench(spec, PROMPTS[:1]).drafter.network
    network.ensure_positions(3000)
    tables = network.cos_sin
    network.ensure_positions(3001)
    assert network.cos_sin is tables


@pytest.mark.parametrize("length", [0, -3, 1.5])
def test_an_impossible_training_length_is_named(tmp_path, length):
    with pytest.raises(ValueError, match=r"^drafter: .*field 'trained_length' must be"):
        Bench(spec_of(tmp_path, trained_length=length), PROMPTS[:1])


@pytest.mark.parametrize(
    "options",
    [
        "top_k=1,levels=5",
        "top_k=4,levels=5,nodes=60,beam=1",
        "top_k=4,levels=5,nodes=9,beam=1",
        "top_k=4,levels=5,nodes=24",
        "top_k=3,levels=12,nodes=60,beam=2",
        "top_k=10,levels=4,nodes=200",
        "top_k=5,levels=1,nodes=4",
    ],
)
def test_a_tree_in_one_call_is_that_of_its_passes_one_by_one(layout, options):
    spec, _ = layout
    whole, single = (Bench(spec, PROMPTS, f"{options},adaptive=false") for _ in range(2))
    assert whole.drafter.native is not None
    single.drafter.native = None
    limits = (100, 100, 2, 3)
    for committed in ([[1, 2, 3], [8], [9, 9], [30, 31]], [[6], [2, 8, 5], [7], [1]], [[5, 4], [1], [2], [3]]):
        for bench in (whole, single):
            bench.commit(committed)
            for request, limit in zip(bench.requests, limits, strict=True):
                request.limit = len(request.tokens) - request.prompt_length + limit + 1
        for one, other in zip(*(bench.drafter.grow(bench.requests, 0.0) for bench in (whole, single)), strict=True):
            assert (list(one.tokens), list(one.parents)) == (list(other.tokens), list(other.parents))
            assert one.chances == pytest.approx(other.chances, rel=1e-4)


def test_pairs_of_several_passes_are_read_as_those_of_one(layout):
    spec, _ = layout
    whole, single = (Bench(spec, PROMPTS, "top_k=3,levels=3,nodes=16,adaptive=false") for _ in range(2))
    single.drafter.native = None
    for drafted in (slice(1, 3), slice(0, 0), slice(0, 4), slice(3, 4), slice(0, 4)):  # the others' pairs wait
        grown = []
        for bench in (whole, single):
            bench.commit([[1, 2, 3], [8], [9, 9], [30, 31, 5, 6]])
            grown.append(bench.drafter.grow(bench.requests[drafted], 0.0) if bench.requests[drafted] else [])
        for one, other in zip(*grown, strict=True):
            assert (list(one.tokens), list(one.parents)) == (list(other.tokens), list(other.parents))
            assert one.chances == pytest.approx(other.chances, rel=1e-4)


def test_weights_are_fetched_ahead_only_behind_a_draft(tmp_path, monkeypatch):
    bench, fetched = Bench(spec_of(tmp_path), PROMPTS[2:]), []
    monkeypatch.setattr(bench.drafter.native, "fetch", lambda: fetched.append(len(bench.requests[0].tokens)))
    for drafts in (True, False, False, True):
        if drafts:
            bench.drafter.grow(bench.requests)
        bench.commit([[1, 2], [3, 4]])
    assert fetched == [39, 45]


@pytest.mark.parametrize("in_core", [True, False], ids=["core", "torch"])
def test_levels_whose_nodes_were_all_left_out_count_as_drafted(tmp_path, in_core):
    bench = Bench(spec_of(tmp_path), PROMPTS, "top_k=2,levels=5,beam=1,nodes=2,adaptive=false")
    if not in_core:
        bench.drafter.native = None
    trees = bench.drafter.propose(bench.requests, 0.0)
    assert max(tree.levels for tree in trees) == 1 and bench.drafter.drafted_levels(trees) == 5
    trees = bench.drafter.propose(bench.requests, 0.0)  # there is no pair that was not read
    assert bench.drafter.drafted_levels(trees) == 0
    bench.commit([[1, 2], [3], [4, 4], [5]])
    trees = bench.drafter.propose(bench.requests, 4.1)
    assert bench.drafter.drafted_levels(trees) == 1


def test_no_pass_of_the_target_is_kept_for_more_than_a_draft(tmp_path):
    bench = Bench(spec_of(tmp_path), PROMPTS[2:])
    bench.drafter.grow(bench.requests, 0.0)
    sizes = []
    for _ in range(3):
        bench.commit([[1, 2], [3, 4]])
        held = [bench.drafter.reader.pairs_of(request)._hidden_states for request in bench.requests]
        sizes.append({sum(part.untyped_storage().nbytes() // part[0].nbytes for part in own) for own in held})
    assert sizes == [{4}, {4}, {6}]  # rows: of a pass of both requests; of each request, copied when others came


@pytest.mark.parametrize("beam", [1, 2])
@pytest.mark.parametrize("min_gain, levels", [(0.0, 5), (4.1, 1)])
def test_a_tree_ends_where_another_level_does_not_pay(tmp_path, min_gain, levels, beam):
    bench = Bench(spec_of(tmp_path), PROMPTS, f"top_k=2,levels=5,beam={beam},adaptive=false")
    children = 2 + (levels - 1) * 2 * beam
    assert {len(tree.tokens) for tree in bench.drafter.grow(bench.requests[2:], min_gain)} == {1 + children}


@pytest.mark.parametrize(("name", "count"), [("official", 40), ("two layers", 1), ("eagle 1", 32), ("official", None)])
def test_layers_are_counted_by_their_tensors(tmp_path, name, count):
    kind, config, state = LAYOUTS[name]
    right = Bench(spec_of(tmp_path, name), PROMPTS)
    wrong = config | {"num_hidden_layers": count}
    other = Bench(f"{kind}:{write_drafter(tmp_path / 'other', wrong, state)}", PROMPTS)
    assert len(other.drafter.network.layers) == (2 if name == "two layers" else 1)
    for ours, theirs in zip(other.grown()[2], right.grown()[2], strict=True):
        assert torch.equal(ours, theirs)


def test_a_reading_with_another_rotary_base_would_be_noticed(tmp_path):
    name, config, state = LAYOUTS["official"]
    other = reading_of(name, config | {"rope_theta": 20000.0}, state)
    with pytest.raises(AssertionError):
        check_against(other, Bench(spec_of(tmp_path), PROMPTS))


TREES = {
    "as published": "adaptive=false",
    "chain": "top_k=1,levels=6,adaptive=false",
    "wide": "top_k=40,levels=2,nodes=256,adaptive=false",
    "deep": "top_k=3,levels=20,nodes=80,adaptive=false",
    "static": "tree=eagle_25,adaptive=false",
    "static, what pays": "tree=eagle_25",
    "what pays": "nodes=24,levels=4,top_k=4",
    "backbone": "levels=5,top_k=3,beam=1,adaptive=false",
    "narrow, what pays": "nodes=24,levels=5,top_k=4,beam=2",
}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", ["official", "two layers", "short context", "eagle 1"])
@pytest.mark.filterwarnings("ignore:drafter")
def test_no_token_changes(tmp_path, name, options, params, batch):
    engine = tiny_engine(f"{spec_of(tmp_path, name)},{options}", max_batch_size=batch)
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, params))
    assert engine.cache.pages_in_use == 0
    if "top_k=40" in options:
        assert max(output.stats.tau for output in outputs) > 1


def test_no_tree_is_deeper_than_its_sequence_needs(tmp_path):
    bench = Bench(spec_of(tmp_path), PROMPTS, "levels=5,top_k=3,nodes=40,adaptive=false")
    assert bench.drafter.max_nodes == 40 and bench.drafter.spare_slots == 40
    for request, limit in zip(bench.requests, (1, 30, 3, 9), strict=True):
        request.limit = limit
    trees = bench.drafter.draft(bench.requests).trees
    depths = [max(len(path_to(tree, node)) for node in range(len(tree.tokens))) for tree in trees]
    assert depths == [0, 0, 2, 5]  # of one token there is no hidden state yet
    assert len(trees[3].tokens) == 40


def test_a_tree_has_the_published_size(tmp_path):
    bench = Bench(spec_of(tmp_path), PROMPTS[:1], "adaptive=false")
    (tree,) = bench.drafter.draft(bench.requests).trees
    assert len(tree.tokens) == 60 == bench.drafter.max_nodes and bench.drafter.spare_slots == 71


def test_a_backbone_has_the_size_of_its_levels(tmp_path):
    bench = Bench(spec_of(tmp_path), PROMPTS[:1], "levels=6,top_k=3,beam=1,adaptive=false")
    (tree,) = bench.drafter.draft(bench.requests).trees
    assert len(tree.tokens) == 1 + 6 * 3 == bench.drafter.max_nodes == bench.drafter.spare_slots
    assert len(set(tree.parents)) == 1 + 6  # the last level has no children: -1, the root and five backbone nodes


def test_a_beam_of_all_children_is_the_published_tree(tmp_path):
    spec, options = spec_of(tmp_path), "levels=4,top_k=3,nodes=20,adaptive=false"
    trees = [
        (bench := Bench(spec, PROMPTS, f"{options}{more}")).drafter.draft(bench.requests).trees
        for more in ("", ",beam=3")
    ]
    assert trees[0] == trees[1]


def test_a_static_tree_holds_the_likeliest_tokens_of_its_ranks(tmp_path):
    paths = [[2], [0], [2, 1], [0, 3], [2, 0], [2, 0, 2], [0, 3, 0]]
    (tmp_path / "tree.json").write_text(json.dumps(paths))
    spec = spec_of(tmp_path)
    static = Bench(spec, PROMPTS[:1], f"tree={tmp_path / 'tree.json'},adaptive=false")
    wide = Bench(spec, PROMPTS[:1], "nodes=200,levels=3,top_k=10,adaptive=false")
    (tree,), ((_, trees, _),) = static.drafter.draft(static.requests).trees, [wide.grown()]
    tokens, parents, _, _ = trees.columns
    children = {}  # of every path, likeliest first
    for node in range(1, tokens.shape[1]):
        path = candidate_path(tokens[0], parents[0], node)
        children.setdefault(tuple(path[:-1]), []).append(path[-1])
    expected = {()}
    for path in paths:
        tokens = ()
        for rank in path:
            tokens = (*tokens, children[tokens][rank])
        expected.add(tokens)
    assert {tuple(path_to(tree, node)) for node in range(len(tree.tokens))} == expected


def test_only_pairs_of_true_features_stay_cached(tmp_path):
    """Drafting twice, or not at all, leaves the same keys and values of what was committed."""
    spec, keys = spec_of(tmp_path, "two layers"), []
    for drafts in (0, 1, 2):
        bench = Bench(spec, [PROMPTS[2]])
        for _ in range(drafts):
            bench.drafter.draft(bench.requests)
        for committed in ([1, 2, 3], [9]):
            bench.commit([committed])
            if drafts:
                bench.drafter.draft(bench.requests)
        bench.drafter.draft(bench.requests)
        pairs = bench.drafter.reader.pairs_of(bench.requests[0]).first
        assert pairs == len(bench.requests[0].tokens) - 1
        (first, *_) = bench.requests[0].pages
        keys.append(bench.drafter.reader.pool.k[:, first, :, :pairs].clone())
    assert torch.allclose(keys[0], keys[1], atol=1e-5) and torch.allclose(keys[0], keys[2], atol=1e-5)


WRONG = {
    "hidden size": (
        CONFIG | {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
        {},
        "embed_tokens.weight' is missing, and hidden_size 32 is not the target's 64",
    ),
    "target's hidden size": (CONFIG | {"target_hidden_size": 48}, {}, "target_hidden_size is 48, the target's is 64"),
    "vocabulary": (CONFIG | {"vocab_size": 300}, {}, "vocab_size is 300, the target's is 320"),
    "feature layers": (
        CONFIG | {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]},
        {},
        r"reads the input of layers \[0, 1, 7\] of the target, which has 2",
    ),
    "default feature layers": (
        CONFIG | {"eagle_aux_hidden_state_layer_ids": None},
        {},
        r"layers \[2, 1, -1\] of the target, which has 2",
    ),
    "number of feature layers": (
        CONFIG | {"eagle_aux_hidden_state_layer_ids": [0, 1]},
        {},
        r"'fc.weight' has shape \(64, 192\), expected \(64, 128\) for features of 2 layers",
    ),
    "map": ({}, {"d2t": torch.full((48,), 300)}, "tensor 'd2t' leads to token 347, the target has 320"),
    "no map": ({}, {"d2t": None}, "'d2t' is missing, though the head has 48 tokens and the target 320"),
    "no norm": ({}, {"norm.weight": None}, "tensor 'norm.weight' is missing"),
    "EAGLE-1": ({}, {"midlayer.hidden_norm.weight": None}, r"is this EAGLE-1 or -2 \(eagle:PATH\)"),
    "unknown": ({}, {"gate.weight": torch.zeros(1, 1)}, "'gate.weight' is unexpected, this layout is not known"),
    "scalars": (
        {},
        {"lm_head.weight": torch.tensor(1.0)},
        r"'lm_head.weight' has shape \(\), expected \[rows, columns\]",
    ),
    "a gap between layers": (
        {},
        {"layers.2.mlp.up_proj.weight": torch.zeros(96, 64)},
        "tensor 'layers.1.input_layernorm.weight' is missing",
    ),
    "an impossible layer": (
        {},
        {"layers.99999.mlp.up_proj.weight": torch.zeros(96, 64)},
        "num_layers must be from 1 to 10000, got 100000",
    ),
    "fusion": ({}, {"fc.weight": torch.zeros(64)}, r"'fc.weight' has shape \(64,\), expected \(64, 192\)"),
    "fusion's bias": ({}, {"fc.bias": torch.zeros(3)}, r"^drafter: .*'fc.bias' has shape \(3,\), expected \(64,\)"),
    "one bias of three": (
        {},
        {"midlayer.self_attn.q_proj.bias": torch.zeros(64)},
        r"^drafter: .*'layers.0.self_attn.k_proj.bias'",
    ),
    "no fusion": (
        CONFIG | {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
        {"fc.weight": None, "embed_tokens.weight": torch.zeros(320, 32)},
        "'fc.weight' is missing, and hidden_size 32 is not the target's",
    ),
    "table": ({}, {"t2d": torch.zeros(9, dtype=torch.bool)}, r"'t2d' has shape \(9,\), expected \(320,\)"),
}


@pytest.mark.parametrize("config, change, message", WRONG.values(), ids=WRONG)
def test_a_drafter_that_does_not_fit_is_refused_with_the_mismatch_named(tmp_path, config, change, message):
    config, state = CONFIG | config, LAYOUTS["official"][2]
    if config["hidden_size"] != 64:
        state = eagle3_state(config, target=64)
    state = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        load_drafter(f"eagle3:{write_drafter(tmp_path, config, state)},adaptive=false", tiny_model().target)


def test_an_eagle3_drafter_is_no_eagle_1_drafter(tmp_path):
    with pytest.raises(ValueError, match="is an EAGLE-3 drafter; use eagle3:PATH"):
        load_drafter(spec_of(tmp_path).replace("eagle3:", "eagle:"), tiny_model().target)
    other = CONFIG | {"hidden_size": 32}
    with pytest.raises(ValueError, match="hidden_size is 32, the target's is 64"):
        load_drafter(f"eagle:{write_drafter(tmp_path / 'small', other, eagle1_state(other))}", tiny_model().target)


@pytest.mark.parametrize(
    "options, message",
    [
        ("nodes=1", "nodes: expected an integer from 2"),
        ("levels=0", "levels: expected an integer from 1"),
        ("levels=40,top_k=10", "levels: 40 of them with top_k=10 are 3910 candidates, at most 2047"),
        ("levels=150,top_k=2", "levels: 150 of them with top_k=2 are 299 rows to attend to"),
        ("top_k=3,beam=4", "beam: expected an integer from 0 to 3, got 4"),
        ("top_k=49,levels=1", "top_k: expected an integer from 1 to 48"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(f"{spec_of(tmp_path)},{options},adaptive=false", tiny_model().target)


def test_a_tree_has_no_more_ranks_than_the_head_has_tokens(tmp_path):
    (tmp_path / "tree.json").write_text("[[0], [400]]")
    with pytest.raises(ValueError, match="tree: ranks: expected an integer from 1 to 48, got 401"):
        load_drafter(f"{spec_of(tmp_path)},tree={tmp_path / 'tree.json'}", tiny_model().target)


def test_weights_of_eight_bits_draft_much_the_same(tmp_path):
    spec = spec_of(tmp_path, "same vocabulary")
    exact, rounded = Bench(spec, PROMPTS[:1]), Bench(spec, PROMPTS[:1], f"{OPTIONS},dtype=int8")
    (_, _, (theirs, *_)), (_, _, (ours, *_)) = exact.grown(), rounded.grown()
    assert torch.nn.functional.cosine_similarity(ours, theirs).item() > 0.99 and not ours.equal(theirs)


@pytest.mark.filterwarnings("ignore:drafter")
def test_a_random_drafter_has_the_size_of_its_preset():
    engine = tiny_engine("eagle3:random:tiny-llama,adaptive=false")
    assert ids(engine.generate(PROMPTS, GREEDY)) == ids(tiny_engine("none").generate(PROMPTS, GREEDY))
    with pytest.raises(ValueError, match="vocab_size is 128256, the target's is 320"):
        tiny_engine("eagle3:random:llama-3.1-8b")


def test_a_drafter_that_guesses_nothing_warns_once(tmp_path):
    with pytest.warns(UserWarning, match="drafter eagle3: . of its first 64 guesses were right. Usual causes") as seen:
        engine = tiny_engine(f"{spec_of(tmp_path)},top_k=1,levels=1,nodes=2,adaptive=false")
        engine.generate([5, 9, 13], SamplingParams(max_new_tokens=150))
    assert len(seen) == 1
