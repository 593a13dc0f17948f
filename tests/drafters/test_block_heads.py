"""DSpark, Domino and DFlash 2: drafts are those of straight-line readings, trees follow the path, no text changes."""

import pytest
import torch

from specengine import SamplingParams
from specengine.drafters import load_drafter
from tests.drafters.block_bench import CHAIN, bench_of, check_chains, drafts, target_ends
from tests.drafters.block_files import BLOCK, Backbone, backbone_state, write
from tests.drafters.block_heads import (
    DFLASH2,
    DOMINO,
    DSPARK,
    SIZES,
    SPECULATORS,
    GruReading,
    MarkovReading,
    SelectorReading,
    dflash2_state,
    domino_state,
    dspark_state,
)
from tests.drafters.eagle_bench import PROMPTS
from tests.drafters.requests import with_logits
from tests.engines import ids, tiny_engine, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)
PLAIN = DSPARK | {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
CUT = [*range(0, 300, 3)]  # tokens of a smaller vocabulary


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def with_group(config, **changes):
    return config | {"dflash_config": config["dflash_config"] | changes}


def shifted(reading):
    reading.first = 0
    return reading


def speculators_state():
    state = dspark_state(SPECULATORS, rows=len(CUT))
    embedding, head = target_ends()
    state["d2t"] = torch.tensor(CUT) - torch.arange(len(CUT))
    state["t2d"] = torch.zeros(len(embedding), dtype=torch.bool)
    return state | {"embed_tokens.weight": embedding, "lm_head.weight": head[CUT]}


def reading(family, state, **options):
    embedding, head = target_ends()
    return family(Backbone(SIZES, state, embedding), head, **options)


def markov(kind):
    return lambda state: reading(MarkovReading, state, kind=kind)


def speculators(state, **layers):
    return MarkovReading(Backbone(SIZES, state, target_ends()[0], **layers), target_ends()[1][CUT], CUT)


def windowed(causal):
    """A drafter of speculators with a window on its first layer, and the reading of its own mask."""
    sizes = SIZES | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = SPECULATORS | {"transformer_layer_config": sizes} | ({} if causal else {"sliding_window_non_causal": True})
    layers = {"causal": (causal, False), "windows": (4, 0), "from_anchor": True}
    return "dspark", config, speculators_state, lambda state: speculators(state, **layers)


def speculators_dflash2():
    """DFlash 2 in the layout of speculators, whose windows leave blocks open unless the file says otherwise."""
    group = {name: value for name, value in DFLASH2["dflash_config"].items() if "conv" in name or "selector" in name}
    sizes = SIZES | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    own = {
        "speculators_model_type": "dflash2",
        "architectures": ["DFlash2DraftModel"],
        "transformer_layer_config": sizes,
    }
    neutral = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 1e6}

    def read(state):
        embedding, head = target_ends()
        backbone = Backbone(SIZES, state, embedding, windows=(4, 0), from_anchor=True)
        return SelectorReading(backbone, head, config={"dflash_config": group | neutral})

    return "dflash", {**SPECULATORS, **own, **group, "markov_rank": None}, dflash2_state, read


# drafter, config.json, state, reading
KINDS = {
    "vanilla": ("dspark", DSPARK, dspark_state, markov("vanilla")),
    "gated": ("dspark", DSPARK | {"markov_head_type": "gated"}, lambda: dspark_state(kind="gated"), markov("gated")),
    "rnn": ("dspark", DSPARK | {"markov_head_type": "rnn"}, lambda: dspark_state(kind="rnn"), markov("rnn")),
    "rank 0, as dflash": (
        "dflash",
        PLAIN | {"architectures": ["Qwen3DFlashModel"]},
        lambda: dspark_state(PLAIN),
        markov(None),
    ),
    "rank 0": ("dspark", PLAIN, lambda: dspark_state(PLAIN), markov(None)),
    "speculators": ("dspark", SPECULATORS, speculators_state, speculators),
    "speculators, window": windowed(causal=True),
    "speculators, open window": windowed(causal=False),
    "domino": ("domino", DOMINO, domino_state, lambda state: reading(GruReading, state)),
    "domino, shifted": (
        "domino",
        with_group(DOMINO, shift_label=True),
        domino_state,
        lambda state: shifted(reading(GruReading, state)),
    ),
    "dflash 2 of speculators": speculators_dflash2(),
    "dflash 2": ("dflash", DFLASH2, dflash2_state, lambda state: reading(SelectorReading, state)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def opened(kind, folder, options=CHAIN):
    """A bench of a drafter, and its reading."""
    torch.manual_seed(7)
    name, config, make, read = KINDS[kind]
    state = make()
    return bench_of(name, folder, config, state, options), read(state)


@kinds
def test_it_drafts_the_chain_of_a_straight_line_reading(tmp_path, kind):
    bench, read = opened(kind, tmp_path)
    if kind == "domino, shifted":  # its last slot is not read
        chain = read.chain
        read.chain = lambda features, anchor: (chain(features, anchor)[0][: BLOCK - 1], None)
    check_chains(bench, read)


@pytest.mark.parametrize("kind", ["gated", "rnn", "domino", "dflash 2"])
def test_a_head_that_is_left_out_would_be_noticed(tmp_path, kind):
    bench, read = opened(kind, tmp_path)
    scores = read.scores
    read.scores = lambda outputs, path: scores(outputs, [5] * len(path))
    with pytest.raises(AssertionError):
        check_chains(bench, read)


def grown(bench):
    """Notes the trees with their chances before a policy or a watch sees them."""
    found, grow = [], bench.drafter.grow

    def noted(*args):
        trees = grow(*args)
        found.extend(trees)
        return trees

    bench.drafter.grow = noted
    return found


@pytest.mark.parametrize(
    "options", ["nodes=20,top_k=4,beam=3", "tree=ddtree,nodes=12", "tree=jetspec,nodes=16,top_k=3"]
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "rank 0" not in kind])
def test_a_node_has_the_chance_that_its_own_path_gives(tmp_path, kind, options):
    bench, read = opened(kind, tmp_path, f"{options},adaptive=false")
    found, count = grown(bench), 0
    texts = [(features, anchor) for features, anchor, _ in drafts(bench)]
    assert len(found) == len(texts)
    for (features, anchor), tree in zip(texts, found, strict=True):
        outputs, paths = read.outputs(features[:, [0, 1]], anchor), [[anchor]]
        for token, parent, chance in list(zip(tree.tokens, tree.parents, tree.chances, strict=True))[1:]:
            logits, confidence = read.scores(outputs, paths[parent])
            expected, best = logits.softmax(-1)[read.tokens.index(token)].item(), logits.softmax(-1).max().item()
            if confidence is not None:
                first = read.tokens[logits.argmax()] == token
                expected = confidence if first else expected * min(1, (1 - confidence) / (1 - best))
            assert chance == pytest.approx(expected, rel=2e-3, abs=1e-7)
            paths.append([*paths[parent], token])
            count += 1
    assert count > 100


def test_a_ddtree_opens_the_likeliest_paths_of_a_head_that_reads_them(tmp_path):
    bench, read = opened("rnn", tmp_path, "tree=ddtree,nodes=10,adaptive=false")
    for features, anchor, tree in drafts(bench):
        outputs = read.outputs(features[:, [0, 1]], anchor)
        frontier, paths = [(0.0, [anchor])], []
        while len(paths) < 10:
            frontier.sort(key=lambda found: -found[0])
            score, path = frontier.pop(0)
            paths.append(path)
            if len(path) <= len(outputs):
                best = read.log_probs(outputs, path).topk(9)
                children = zip(best.values.tolist(), best.indices.tolist(), strict=True)
                frontier += [(score + own, [*path, token]) for own, token in children]
        found = [[anchor]]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            found.append([*found[parent], token])
        assert found == paths


@pytest.mark.parametrize("threshold", [0.3, 0.5, 1.0])
def test_a_chain_ends_before_the_first_token_of_less_confidence(tmp_path, threshold):
    bench, read = opened("vanilla", tmp_path, f"{CHAIN},threshold={threshold}")
    lengths = set()
    for features, anchor, tree in drafts(bench):
        outputs = read.outputs(features[:, [0, 1]], anchor)
        path = [anchor, *read.chain(features[:, [0, 1]], anchor)[0]]
        kept = 0
        while kept < BLOCK and read.scores(outputs, path[: kept + 1])[1] >= threshold:
            kept += 1
        assert tree.tokens == path[: kept + 1]
        lengths.add(kept)
    assert lengths == {0} if threshold == 1 else len(lengths) > 1


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_a_drawn_chain_ends_where_the_confidence_says_so(tmp_path, threshold):
    bench, read = opened("vanilla", tmp_path, f"{CHAIN},threshold={threshold},sample=true")
    request, lengths = bench.requests[0], set()
    request.params = SAMPLED
    for committed in ([1], [2, 3], [4], [5, 6]):
        bench.commit([committed, [1], [1], [1]])
        features = bench.hidden_states(request.tokens).at_layers[: len(request.tokens) - 1]
        outputs = read.outputs(features[:, [0, 1]], request.tokens[-1])
        (tree,), _ = with_logits(bench.drafter, [request], sampled=True)
        kept = len(tree.tokens) - 1
        sure = [read.scores(outputs, tree.tokens[: level + 1])[1] >= threshold for level in range(min(BLOCK, kept + 1))]
        assert all(sure[:kept]) and (kept == BLOCK or not sure[kept])
        lengths.add(kept)
    assert lengths == {BLOCK} if not threshold else len(lengths) > 1


TREES = {"chain": CHAIN, "levels": "nodes=20,top_k=3,adaptive=false", "what pays": "nodes=24,top_k=4"}


@pytest.mark.quick(4)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
@pytest.mark.parametrize("kind", ["vanilla", "rnn", "speculators", "domino", "dflash 2"])
def test_no_token_changes(tmp_path, kind, options, params, batch):
    torch.manual_seed(7)
    name, config, make, _ = KINDS[kind]
    spec = f"{name}:{write(tmp_path / name, config, make())},{options}"
    engine = tiny_engine(spec, max_batch_size=batch)
    assert ids(engine.generate(PROMPTS, params)) == ids(tiny_engine("none").generate(PROMPTS, params))
    assert engine.cache.pages_in_use == 0


def lacking(state, name):
    return {own: tensor for own, tensor in state().items() if own != name}


REFUSED = {
    "kind of head": ("dspark", DSPARK | {"markov_head_type": "wide"}, dspark_state, "field 'markov_head_type' must be"),
    "rank": ("dspark", DSPARK | {"markov_rank": 4}, dspark_state, "'markov_head.markov_w1.weight' has shape"),
    "rank -1": ("dspark", DSPARK | {"markov_rank": -1}, dspark_state, "field 'markov_rank' must not be negative"),
    "no gate": (
        "dspark",
        DSPARK | {"markov_head_type": "gated"},
        dspark_state,
        "'markov_head.gate_proj.weight' is miss",
    ),
    "confidence": (
        "dspark",
        DSPARK | {"enable_confidence_head": False},
        dspark_state,
        "field 'enable_confidence_head' is false, and there is a tensor",
    ),
    "no confidence": (
        "dspark",
        DSPARK,
        lambda: lacking(dspark_state, "confidence_head.proj.weight"),
        "tensor 'confidence_head.proj.weight' is missing",
    ),
    "no shift": ("domino", with_group(DOMINO, shift_label=None), domino_state, "field 'shift_label' is missing"),
    "multiplier": (
        "domino",
        with_group(DOMINO, output_multiplier=0.5),
        domino_state,
        "field 'output_multiplier' is not supported in a drafter of family domino",
    ),
    "group": ("dflash", with_group(DFLASH2, conv_group_size=7), dflash2_state, "field 'conv_group_size' must divide"),
    "taps": ("dflash", with_group(DFLASH2, conv_kernel_size=3), dflash2_state, "base_kernel' has shape"),
    "candidates": ("dflash", with_group(DFLASH2, selector_top_k=500), dflash2_state, "'selector_top_k' must be from 1"),
    "another family": ("dspark", DOMINO, domino_state, "is a domino drafter; use domino:PATH"),
    "threshold": (
        "dspark",
        PLAIN,
        lambda: backbone_state(SIZES),
        "has no confidence head, which threshold=0.5 asks for",
    ),
}


@pytest.mark.parametrize("name, config, state, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name, config, state, message):
    options = ",tree=chain,threshold=0.5" if config is PLAIN else ""
    with pytest.raises(ValueError, match=f"^drafter: .*{message}"):
        load_drafter(f"{name}:{write(tmp_path / name, config, state())}{options}", tiny_model().target)


@pytest.mark.parametrize("options", ["nodes=2", "nodes=4,top_k=3", CHAIN])
def test_a_drawn_tree_has_no_more_nodes_than_the_options_allow(tmp_path, options):
    drafter = opened("vanilla", tmp_path, options)[0].drafter
    nodes = drafter.drawn_shape.candidates
    assert nodes <= drafter.max_nodes and nodes == min(drafter.max_nodes, 1 + BLOCK)
