"""DFlash and JetSpec: their drafts are those of straight-line readings, and no text changes."""

import math

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine._C import PAGE_SIZE
from specengine.drafters import load_drafter
from specengine.models.draft_random import random_dflash
from tests.drafters.block_bench import CHAIN, bench_of, check_chains, drafts, target_ends
from tests.drafters.block_files import BLOCK, DFLASH, GROUP, JETSPEC, Backbone, PlainReading, backbone_state, write
from tests.drafters.eagle_bench import PROMPTS
from tests.engines import ids, tiny_engine, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
# Changes of config.json, options of the state, and what the reading's layers then do.
KINDS = {
    "dflash": (DFLASH, {}, {}),
    "jetspec": (JETSPEC, {}, {"causal": (True, True)}),
    "biases": (DFLASH | {"attention_bias": True}, {"bias": True}, {}),
    "sliding": (DFLASH | SLIDING, {}, {"causal": (True, False), "windows": (4, 0)}),
    "sliding, open blocks": (DFLASH | SLIDING | {"is_causal": False}, {}, {"windows": (4, 0)}),
    "a window that is off": (
        DFLASH | {"dflash_config": GROUP | {"use_swa": False, "swa_window_size": 4}},
        {},
        {},
    ),
    "sliding jetspec": (JETSPEC | SLIDING, {}, {"causal": (True, True), "windows": (4, 0)}),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def state_of(config, **options):
    torch.manual_seed(7)
    return backbone_state(config, **options)


def name_of(kind):
    return "jetspec" if "jetspec" in kind else "dflash"


def reading_of(state, config=DFLASH, first=1, **layers):
    embedding, head = target_ends()
    return PlainReading(Backbone(config, state, embedding, **layers), head, first)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_the_chain_of_a_straight_line_reading(tmp_path, kind):
    config, options, layers = KINDS[kind]
    state = state_of(config, **options)
    check_chains(bench_of(name_of(kind), tmp_path, config, state), reading_of(state, config, **layers))


def test_features_are_read_in_the_order_of_the_file(tmp_path):
    config, state = DFLASH | {"dflash_config": GROUP | {"target_layer_ids": [0, -1]}}, state_of(DFLASH)
    check_chains(bench_of("dflash", tmp_path, config, state), reading_of(state), layers=(1, 0))


def test_a_slot_predicts_the_next_token_where_the_file_says_so(tmp_path):
    config, state = DFLASH | {"sample_from_anchor": True}, state_of(DFLASH)
    bench = bench_of("dflash", tmp_path, config, state)
    check_chains(bench, reading_of(state, first=0))
    assert bench.drafter.max_nodes == 1 + BLOCK


WRONG = {
    "slots": {"first": 0},
    "causal": {"causal": (True, True)},
    "window": {"windows": (4, 0)},
}


@pytest.mark.parametrize("layers", WRONG.values(), ids=WRONG)
def test_another_convention_would_be_noticed(tmp_path, layers):
    state = state_of(DFLASH)
    with pytest.raises(AssertionError):
        check_chains(bench_of("dflash", tmp_path, DFLASH, state), reading_of(state, **layers))


def likeliest_prefixes(log_probs, count):
    """The likeliest paths of independent levels, by brute force over the likeliest tokens of each."""
    paths, best = [((), 0.0)], []
    for level in log_probs:
        top = level.topk(count)
        tokens = list(zip(top.values.tolist(), top.indices.tolist(), strict=True))
        paths = [((*path, token), score + own) for path, score in paths for own, token in tokens]
        paths = sorted(paths, key=lambda found: -found[1])[: 4 * count]
        best += paths
    return {path for path, _ in sorted(best, key=lambda found: -found[1])[:count]}


def paths_of(tree):
    found = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


@pytest.mark.parametrize("options", ["tree=ddtree,nodes=16", "nodes=16,top_k=15"])
def test_ddtree_has_the_likeliest_prefixes(tmp_path, options):
    state = state_of(DFLASH)
    reading = reading_of(state)
    for features, anchor, tree in drafts(bench_of("dflash", tmp_path, DFLASH, state, f"{options},adaptive=false")):
        _, log_probs = reading.chain(features[:, :2], anchor)
        assert set(paths_of(tree)) == likeliest_prefixes(log_probs, 15)


@pytest.mark.parametrize("kind", ["jetspec", "top2gap"])
def test_jetspec_opens_the_likeliest_node_with_all_its_children(tmp_path, kind):
    state = state_of(JETSPEC)
    reading = reading_of(state, causal=(True, True))
    options = f"tree={kind},nodes=20,top_k=3,adaptive=false"
    for features, anchor, tree in drafts(bench_of("jetspec", tmp_path, JETSPEC, state, options)):
        _, log_probs = reading.chain(features[:, :2], anchor)
        nodes, parents, scores, depths, opened = [anchor], [-1], [0.0], [0], set()
        while len(nodes) < 20 and len(opened) < len(nodes):
            best = max((n for n in range(len(nodes)) if n not in opened), key=lambda n: (scores[n], -n))
            opened.add(best)
            if depths[best] == BLOCK - 1:
                continue
            top = log_probs[depths[best]].topk(3)
            gap = (top.values[0] - top.values[1]).item()
            width = max(1, round(3 * torch.tensor(1 - gap).sigmoid().item())) if kind == "top2gap" else 3
            for token, own in list(zip(top.indices.tolist(), top.values.tolist(), strict=True))[:width]:
                nodes.append(token), parents.append(best)
                scores.append(scores[best] + own), depths.append(depths[best] + 1)
        assert (tree.tokens, tree.parents) == (nodes[:20], parents[:20])


TREES = {
    "chain": CHAIN,
    "jetspec": "tree=jetspec,nodes=12,top_k=3,adaptive=false",
    "wide": "tree=ddtree,nodes=256,adaptive=false",
    "what pays": "nodes=24,top_k=4",
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
@pytest.mark.parametrize("kind", ["dflash", "jetspec"])
def test_no_token_changes(tmp_path, kind, options, params, batch):
    config = KINDS[kind][0]
    engine = tiny_engine(f"{kind}:{write(tmp_path / kind, config, state_of(config))},{options}", max_batch_size=batch)
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, params))
    assert engine.cache.pages_in_use == 0
    if "adaptive=false" in options:
        assert all(output.stats.acceptance_by_depth for output in outputs)
    if "nodes=256" in options:
        assert max(output.stats.tau for output in outputs) > 1


def test_a_prompt_that_begins_like_an_earlier_one_is_found_as_far_without_a_drafter(tmp_path):
    shared = [(7 * i) % 90 for i in range(2 * PAGE_SIZE + 9)]
    own = f"dflash:{write(tmp_path / 'dflash', DFLASH, state_of(DFLASH))}"
    for drafter in (f"{own},adaptive=false", f"combine:prompt_lookup+{own};adaptive=false"):
        engine, plain = tiny_engine(drafter), tiny_engine("none")
        for prompt in ([*shared, i] for i in range(3)):
            assert ids(engine.generate([prompt], GREEDY)) == ids(plain.generate([prompt], GREEDY))
        assert engine.cache.prefixes.hit == plain.cache.prefixes.hit == 2 * 2 * PAGE_SIZE


def test_a_context_that_another_request_left_drafts_alike(tmp_path):
    shared = [(7 * i) % 90 for i in range(2 * PAGE_SIZE + 9)]
    spec = f"dflash:{write(tmp_path / 'dflash', DFLASH, state_of(DFLASH))},tree=chain,adaptive=false"
    params = SamplingParams(max_new_tokens=12, trace=True)
    (alone,) = tiny_engine(spec).generate([[*shared, 5]], params)
    engine = tiny_engine(spec)
    engine.generate([[*shared, 4]], params)
    (after,) = engine.generate([[*shared, 5]], params)
    assert engine.cache.prefixes.hit and [cycle.tokens for cycle in after.trace] == [c.tokens for c in alone.trace]


def with_keys(**changes):
    return DFLASH | changes


REFUSED = {
    "projector": (with_keys(dflash_config=GROUP | {"projector_type": "xpress"}), {}, "field 'projector_type' must be"),
    "unknown": (with_keys(dflash_config=GROUP | {"jacobi": 6}), {}, "field 'jacobi' in dflash_config is not known"),
    "two values": (with_keys(mask_token_id=3), {}, "field 'mask_token_id' is 3 and, in dflash_config, 319"),
    "value scale": (with_keys(attention_value_scale=0.7), {}, "field 'attention_value_scale' is 0.7, which is not"),
    "a window in the group": (
        with_keys(dflash_config=GROUP | {"swa_window_size": 4}),
        {},
        "'swa_window_size' is 4, which",
    ),
    "a window that is on": (with_keys(use_swa=True), {}, "field 'use_swa' is True, which is not supported"),
    "rope style": (with_keys(is_neox_style=False), {}, "field 'is_neox_style' is False"),
    "adapter": (with_keys(target_hidden_size=32), {}, "field 'target_hidden_size' is 32, the target has 64"),
    "layers": (with_keys(num_target_layers=4), {}, "field 'num_target_layers' is 4, the target has 2"),
    "vocabulary": (with_keys(vocab_size=512), {}, "field 'vocab_size' is 512, the target has 320"),
    "mask": (with_keys(dflash_config=GROUP | {"mask_token_id": 320}), {}, "field 'mask_token_id' is 320"),
    "no mask": (with_keys(dflash_config={}), {}, "field 'mask_token_id' is missing"),
    "no features": (
        with_keys(dflash_config={"mask_token_id": GROUP["mask_token_id"]}),
        {},
        "field 'target_layer_ids' is missing; expected the layers of the target",
    ),
    "feature": (
        with_keys(dflash_config=GROUP | {"target_layer_ids": [0, 2]}),
        {},
        r"field 'target_layer_ids' names layers \[0, 2\] of the target, which has 2",
    ),
    "last feature": (
        with_keys(dflash_config=GROUP | {"target_layer_ids": [0, 1]}),
        {},
        "field 'target_layer_ids' names the last layer's output",
    ),
    "window": (with_keys(layer_types=["sliding_attention"] * 2), {}, "field 'sliding_window' must be positive"),
    "kind": (with_keys(architectures=["Gemma4DFlashModel"]), {}, "field 'architectures' names Gemma4DFlashModel"),
    "activation": (with_keys(hidden_act="gelu"), {}, "field 'hidden_act' must be 'silu'"),
    "size": (DFLASH, {"fc.weight": torch.zeros(64, 64)}, r"'fc.weight' has shape \(64, 64\), expected \(64, 128\)"),
    "missing": (DFLASH, {"norm.weight": None}, "tensor 'norm.weight' is missing"),
    "other kind": (DFLASH, {"hidden_norm.weight": None}, "is no one-pass block drafter: tensor 'hidden_norm.weight'"),
    "more": (DFLASH, {"layers.0.self_attn.g_proj.weight": torch.zeros(4, 4)}, "'layers.0.self_attn.g_proj.weight' is"),
    "head": (DFLASH, {"lm_head.weight": torch.zeros(100, 64)}, "'lm_head.weight' has shape"),
}


@pytest.mark.parametrize("config, changes, message", REFUSED.values(), ids=REFUSED)
def test_what_is_not_implemented_or_does_not_fit_is_refused_by_name(tmp_path, config, changes, message):
    state = {name: tensor for name, tensor in (state_of(DFLASH) | changes).items() if tensor is not None}
    with pytest.raises(ValueError, match=f"^drafter: .*{message}"):
        load_drafter(f"dflash:{write(tmp_path / 'dflash', config, state)}", tiny_model().target)


def test_a_name_takes_its_own_family(tmp_path):
    folder = write(tmp_path / "dflash", DFLASH, state_of(DFLASH))
    with pytest.raises(ValueError, match="is a drafter whose slots all see each other; use dflash:PATH"):
        load_drafter(f"jetspec:{folder}", tiny_model().target)
    with pytest.raises(ValueError, match="threshold: expected tree=chain"):
        load_drafter(f"dflash:{folder},threshold=0.5", tiny_model().target)
    with pytest.raises(
        ValueError, match="tree: expected one of chain, jetspec, top2gap, ddtree or nothing, got 'wide'"
    ):
        load_drafter(f"dflash:{folder},tree=wide", tiny_model().target)


SPELLINGS = {
    "model.": lambda name: f"model.{name}",
    "vllm": lambda name: {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }.get(name, name.replace("layers.", "midlayer.")),
}


@pytest.mark.parametrize("spelled", SPELLINGS.values(), ids=SPELLINGS)
def test_published_spellings_of_names_are_read(tmp_path, spelled):
    state = state_of(DFLASH)
    bench = bench_of("dflash", tmp_path, DFLASH, {spelled(name): tensor for name, tensor in state.items()})
    check_chains(bench, reading_of(state))


def test_copies_of_the_target_s_embedding_and_head_are_shared_and_own_ones_are_read(tmp_path):
    embedding, head = target_ends()
    state, target = state_of(DFLASH), tiny_model().target
    copies = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    shared = load_drafter(f"dflash:{write(tmp_path / 'copies', DFLASH, state | copies)}", target)
    network = shared.network
    assert network.backbone.embedding is target.embedding and network.head.projections == [target.head]
    own = {name: tensor.flip(0) for name, tensor in copies.items()}
    reading = PlainReading(Backbone(DFLASH, state, own["embed_tokens.weight"]), own["lm_head.weight"])
    check_chains(bench_of("dflash", tmp_path, DFLASH, state | own), reading)


def test_engines_on_the_cpu_serve_it_beside_any_rule_that_takes_trees(tmp_path):
    folder = write(tmp_path / "dflash", DFLASH, state_of(DFLASH))
    plain = ids(tiny_engine("none").generate(PROMPTS, GREEDY))
    chain = Engine(tiny_model(), drafter=f"dflash:{folder},tree=chain", rule="block")
    assert len(ids(chain.generate(PROMPTS, GREEDY))) == len(plain)
    with pytest.raises(ValueError, match="rule: block takes chains only, and drafter dflash"):
        Engine(tiny_model(), drafter=f"dflash:{folder}", rule="block")


def test_a_random_drafter_has_the_published_sizes():
    engine = tiny_engine("dflash:random:tiny-llama,nodes=20,adaptive=false")
    assert ids(engine.generate(PROMPTS, GREEDY)) == ids(tiny_engine("none").generate(PROMPTS, GREEDY))
    large = random_dflash("llama-3.1-8b")
    numbers = sum(math.prod(tensor.shape) for tensor in large.tensors.values())
    assert large.json["block_size"] == 16 and 1.1e9 < numbers < 1.25e9
    with pytest.raises(ValueError, match=r"^drafter: unknown preset 'nonsense'"):
        random_dflash("nonsense")
