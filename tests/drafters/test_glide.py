import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specengine import Engine, SamplingParams
from specengine.draft_policy.cost_model import CycleCosts
from specengine.drafters import load_drafter
from specengine.drafters.glide import rows as glide_rows
from specengine.drafters.glide.config import THRESHOLDS, WIDTHS, Config
from specengine.drafters.glide.drafter import Glide
from specengine.drafters.glide.reader import GlideReader
from specengine.drafters.glide.rows import GlideRows
from specengine.models.checkpoint import open_checkpoint
from specengine.tensor_parallel.loading import LoadedModel, load_model
from specengine.train.objectives import glide as trained
from specengine.train.objectives.target_layers import shape_of
from tests.drafters.dense import attended, dense_target, largest_error, mlp, normed, projected, rotated
from tests.drafters.glide_files import JSON, glide_state, write
from tests.drafters.steady import steady
from tests.drafters.steered import steer
from tests.engines import GREEDY, SAMPLED, ids
from tests.models.files import CONFIG_JSON, random_state, write_folder

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 70)), [3, 4]]
# another rotary base than the drafter's own, and more layers than it has
TARGET_JSON = {**CONFIG_JSON, "rope_theta": 500000.0, "num_hidden_layers": 3, "eos_token_id": None}
SHARED = {**JSON, "hidden_size": 64, "num_attention_heads": 4}  # embedding and head are the target's


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(TARGET_JSON))
    seeded = replace(load_model("random:tiny-llama", device="cpu").config, num_layers=3)
    write_folder(folder, random_state(seeded))
    (folder / "config.json").write_text(json.dumps(TARGET_JSON))
    return load_model(folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def target_state(model):
    checkpoint = open_checkpoint(model.name)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def drafter_of(model, folder, in_core=True, **options) -> Glide:
    """in_core: drafts are one call of the core, as they are on the CPU; otherwise the passes can be watched."""
    options = {"adaptive": "false", **options}
    text = ",".join([f"glide:{folder}", *(f"{name}={value}" for name, value in options.items())])
    drafter = load_drafter(text, model.target)
    if not in_core:
        drafter.native = None
    return drafter


def watched(drafter) -> list[list[torch.Tensor]]:
    """Lists the logits [B, Vd] of every level, draft by draft."""
    seen, draft = [], drafter.network.draft

    def noted(opened, levels):
        steps, rows, own = draft(opened, levels), None, []
        seen.append(own)
        while True:
            found = steps.send(rows)
            own.append(found.values)
            rows = yield found

    drafter.network.draft = noted
    return seen


def dense_logits(state, config, target_state, target, tokens, drafted, cross=True):
    """Logits [1 + drafted, Vd] from the root on, which is the last of `tokens`; the target has cached the others."""
    theirs, verified = dense_target(target_state, target, tokens[:-1]), len(tokens) - 1
    rows, block, window = [*tokens, *drafted], config["block_size"], config["max_position_embeddings"]
    i, width = torch.arange(len(rows)), config["hidden_size"] // config["num_attention_heads"]
    own = (i[:, None] >= i[None]) & (i[:, None] - i[None] < window)
    j = torch.arange(verified)
    trained = (j // block < i[:, None] // block) | ((i[:, None] < block) & (j <= i[:, None]))
    seen = torch.where(i[:, None] < verified, trained, torch.ones_like(trained))
    seen &= seen.sum(-1, keepdim=True) - j <= window
    embedding = state.get("model.embed_tokens.weight", target_state["model.embed_tokens.weight"])
    x = embedding[rows]
    for m in range(config["num_hidden_layers"]):
        prefix, which = f"model.layers.{m}", target.num_layers - config["num_hidden_layers"] + m
        normal = normed(x, state[f"{prefix}.input_layernorm.weight"], config["rms_norm_eps"])
        q, k, v = projected(normal, state, prefix, width)
        q, k = (rotated(each, i, 10000.0) for each in (q, k))
        x = x + attended(q, k, v, own) @ state[f"{prefix}.self_attn.o_proj.weight"].T
        if cross:
            q = (x @ state[f"{prefix}.cross_attn.q_proj.weight"].T).unflatten(-1, (target.num_heads, target.head_dim))
            q = rotated(q, i, target.rope.theta)
            read = attended(q, theirs.keys[which], theirs.values[which], seen)
            x = x + read @ state[f"{prefix}.cross_attn.o_proj.weight"].T
        x = x + mlp(
            normed(x, state[f"{prefix}.post_attention_layernorm.weight"], config["rms_norm_eps"]), state, prefix
        )
    x = normed(x, state["model.norm.weight"], config["rms_norm_eps"])[verified:]
    return x @ state.get("lm_head.weight", target_state.get("lm_head.weight", embedding)).T


CASES = {
    "own embedding and head": (JSON, {}, {}),
    "the target's embedding and head": (SHARED, {"own": False}, {}),
    "chain": (JSON, {}, {"cape": "false", "length": 6}),
    "without the target's cache": (JSON, {}, {"cross": "false"}),
    "one layer": ({**JSON, "num_hidden_layers": 1}, {}, {}),
    "beyond its trained length": ({**JSON, "max_position_embeddings": 9}, {}, {}),
    "other blocks": ({**JSON, "block_size": 3}, {}, {}),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES)
def test_draft_logits_are_those_of_a_dense_reading_whatever_is_accepted(case, model, target_state, tmp_path):
    config, made, options = CASES[case]
    state, checked = glide_state(config, **made), 0
    drafter = drafter_of(model, write(tmp_path, state, config), in_core=False, **options)
    seen = watched(drafter)
    drafts = steer(drafter, PROMPTS, GREEDY, model=model).drafts
    for (before, trees), ours in zip([d for d in drafts if any(len(t.tokens) > 1 for t in d[1])], seen, strict=True):
        known = [(tokens, tree) for tokens, tree in zip(before, trees, strict=True) if len(tree.tokens) > 1]
        for row, (tokens, _) in enumerate(known):
            drafted = [int(level[row].argmax()) for level in ours[:-1]]
            theirs = (state, config, target_state, model.config, tokens, drafted, options.get("cross") != "false")
            expected = dense_logits(*theirs)
            assert all(largest_error(level[row], line) < 1e-4 for level, line in zip(ours, expected, strict=True))
            checked += 1
    assert checked > 30 and {len(each) for each in seen} >= {drafter.config.length}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_one_call_of_the_core_drafts_what_the_passes_draft(case, dtype, model, tmp_path, monkeypatch):
    config, made, options = CASES[case]
    kept = torch.arange(1, 320, 3)
    state = glide_state(config, **made, d2t=kept - torch.arange(len(kept)))
    folder, seen, grow = write(tmp_path, state, config), [], Glide.grow
    monkeypatch.setattr(Glide, "grow", lambda *args: seen.append(grow(*args)) or seen[-1])
    for in_core in (True, False):
        steer(drafter_of(model, folder, in_core, dtype=dtype, **options), PROMPTS, GREEDY, model=model)
    trees = [tree for batch in seen for tree in batch]
    assert len(seen) % 2 == 0 and len(trees) > 60
    for ours, theirs in zip(trees[: len(trees) // 2], trees[len(trees) // 2 :], strict=True):
        assert (list(ours.tokens), list(ours.parents)) == (list(theirs.tokens), list(theirs.parents))
        assert ours.chances == pytest.approx(theirs.chances, rel=1e-4)


def test_no_level_is_drafted_that_adds_too_little(model, tmp_path):
    drafter, depths = drafter_of(model, write(tmp_path, glide_state()), cape="false"), []
    propose = drafter.propose

    def watched(requests, min_gain):
        depths.append([len(propose(requests, gain)[0].tokens) - 1 for gain in (0.0, 0.02, 1.01)])
        return propose(requests, 0.0)

    drafter.propose = watched
    steer(drafter, PROMPTS[:1], GREEDY, model=model)
    assert all(row == sorted(row, reverse=True) for row in depths)
    every, some, one = zip(*depths, strict=True)
    assert max(every) == 4 and set(one) == {1} and sum(one) < sum(some) < sum(every)


def test_trees_are_backbones_with_more_siblings_where_the_drafter_is_unsure(model, target_state, tmp_path):
    state = glide_state()
    drafts = steer(drafter_of(model, write(tmp_path, state)), PROMPTS, GREEDY, model=model).drafts
    widths = set()
    for tokens, tree in ((t, tree) for before, trees in drafts for t, tree in zip(before, trees, strict=True)):
        node, drafted = 0, []
        while children := [i for i, parent in enumerate(tree.parents) if parent == node]:
            logits = dense_logits(state, JSON, target_state, model.config, tokens, drafted)[-1]
            width = WIDTHS[sum(logits.softmax(-1).max() > threshold for threshold in THRESHOLDS)]
            assert [tree.tokens[child] for child in children] == logits.argsort(descending=True)[:width].tolist()
            widths.add(width)
            node = children[0]
            drafted.append(tree.tokens[node])
    assert widths >= {8, 6, 4}


@pytest.mark.parametrize("own", [True, False])
def test_a_reduced_vocabulary_drafts_the_tokens_its_table_names(own, model, target_state, tmp_path):
    kept = torch.arange(1, 320, 3)
    config = JSON if own else SHARED
    state = glide_state(config, own=own, d2t=kept - torch.arange(len(kept)))
    before, (tree,) = steer(drafter_of(model, write(tmp_path, state, config)), PROMPTS[:1], GREEDY, model=model).drafts[
        0
    ]
    logits = dense_logits(state, config, target_state, model.config, before[0], [])[0]
    logits = logits if own else logits[kept]
    assert tree.tokens[1] == kept[logits.argmax()] and set(tree.tokens[1:]) <= set(kept.tolist())


def test_tokens_that_its_embedding_lacks_do_no_harm(model, tmp_path):
    config = {**JSON, "vocab_size": 40}
    drafter = drafter_of(model, write(tmp_path, glide_state(config), config))
    drafted = [tree for _, trees in steer(drafter, PROMPTS, GREEDY, model=model).drafts for tree in trees]
    assert all(token < 40 for tree in drafted for token in tree.tokens[1:]) and len(drafted) > 10


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("options", ["adaptive=false", "cape=false,adaptive=false", "length=6"])
def test_the_output_is_that_of_plain_decoding(model, tmp_path, options, batch, params):
    plain = ids(Engine(model, drafter="none").generate(PROMPTS, params))
    folder = write(tmp_path, glide_state(SHARED, own=False), SHARED)
    engine = Engine(model, drafter=f"glide:{folder},{options}", max_batch_size=batch)
    assert ids(engine.generate(PROMPTS, params)) == plain


def test_long_prompts_are_passed_in_parts(model, target_state, tmp_path, monkeypatch):
    state, tokens = glide_state(), [(7 * i) % 319 for i in range(300)]
    drafter = drafter_of(model, write(tmp_path, state))
    drafter.reader._prefill_rows = 64
    passes, of = [], GlideRows.of
    monkeypatch.setattr(GlideRows, "of", lambda rows, *rest: passes.append(rows.nodes) or of(rows, *rest))
    before, (tree,) = steer(drafter, [tokens], GREEDY, model=model).drafts[0]
    assert max(passes) <= 64 and sum(passes[:6]) > 200
    assert tree.tokens[1] == dense_logits(state, JSON, target_state, model.config, before[0], [])[0].argmax()


def test_rows_see_the_blocks_before_theirs_and_drafts_all_there_is():
    def seen(*columns):
        return glide_rows.visible(*map(np.array, columns), 5).tolist()

    assert seen([0], [12], [15]) == [1, 2, 3, 4, 5, *[5] * 5, 10, 10, 12, 12, 12]
    assert seen([9, 3], [10, 3], [2, 1]) == [5, 10, 3]


@pytest.mark.parametrize(("row", "deepest"), [(1.0, 1), (0.0, 4)])
def test_it_drafts_no_level_whose_rows_are_dear(model, tmp_path, row, deepest):
    write(tmp_path, glide_state())
    costs = CycleCosts({1: 1.0, 32: 1 + 31 * row})
    drafter, depths = steady(Glide(Config(cape=False), str(tmp_path), model.target, costs=costs)), []
    propose = drafter.propose

    def watched(requests, min_gain):
        trees = propose(requests, min_gain)
        depths.append(trees[0].levels)
        return trees

    drafter.propose = watched
    steer(drafter, PROMPTS[:1], GREEDY, model=model)
    assert max(depths) == deepest


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({**JSON, "large_num_attention_heads": 8}, {}, "'large_num_attention_heads' is 8, the target has 4"),
        ({**JSON, "large_hidden_size": 128}, {}, "'large_hidden_size' is 128, the target has 64"),
        ({**JSON, "large_head_dim": 32}, {}, "'large_head_dim' is 32, the target has 16"),
        ({**JSON, "num_hidden_layers": 4}, {}, "'num_hidden_layers' is 4, the target has 3"),
        ({**JSON, "block_size": 0}, {}, "'block_size' must be positive"),
        (JSON, {"model.layers.1.cross_attn.q_proj.weight": (32, 48)}, r"has shape \(32, 48\), expected \(64, 48\)"),
        (JSON, {"model.layers.0.self_attn.k_proj.weight": (48, 48)}, r"has shape \(48, 48\), expected \(16, 48\)"),
        (JSON, {"lm_head.weight": (400, 48)}, "'lm_head.weight' has 400 tokens, the target has 320"),
        (JSON, {"lm_head.weight": None}, "without lm_head.weight it shares the target's, of hidden size 64 instead of"),
        (JSON, {"model.norm.weight": None}, "'model.norm.weight' is missing"),
    ],
)
def test_a_drafter_of_another_target_is_refused(model, tmp_path, config, change, message):
    state = glide_state(config)
    for name, shape in change.items():
        del state[name]
        state |= {} if shape is None else {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=message):
        drafter_of(model, write(tmp_path, state, config))


def test_without_the_targets_cache_no_weights_for_it_are_needed(model, tmp_path):
    state = {name: tensor for name, tensor in glide_state().items() if "cross_attn" not in name}
    drafter_of(model, write(tmp_path, state), cross="false")
    with pytest.raises(ValueError, match=r"cross_attn\.q_proj\.weight' is missing"):
        drafter_of(model, tmp_path)
    drafter_of(model, write(tmp_path, state, {**JSON, "cross_attention": False}))


def test_it_drafts_what_the_trained_network_says(model, target_state, tmp_path):
    """Where a block of training begins at the root, the network saw just what the drafter sees."""
    c, tokens = model.config, PROMPTS[2][:61]
    network = trained.Glide(shape_of(c), 2, c)
    state = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    sizes = {"num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, "rope_theta": c.rope.theta}
    config = {**JSON, **sizes, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size}
    drafter = drafter_of(model, write(tmp_path, state, config), in_core=False, length=1)
    seen = watched(drafter)
    steer(drafter, [tokens], GREEDY, model=model)
    theirs = dense_target(target_state, c, tokens)
    keys, values = (torch.stack(each[-2:])[:, None].transpose(2, 3) for each in (theirs.keys, theirs.values))
    embedding = target_state["model.embed_tokens.weight"]
    with torch.no_grad():
        states = network(embedding[tokens][None], keys, values, trained.block_mask(len(tokens), 5))
    expected = target_state.get("lm_head.weight", embedding) @ states[0, -1]
    assert largest_error(seen[0][0][0], expected) < 1e-4


def first_errors(model, target_state, folder):
    """How far the first level's logits are from the dense reading, cycle by cycle of one request."""
    drafter = drafter_of(model, folder, in_core=False, cape="false", length=1)
    seen = watched(drafter)
    before = [tokens[0] for tokens, trees in steer(drafter, PROMPTS[:1], GREEDY, model=model).drafts]
    state = load_file(folder / "model.safetensors")
    return [
        largest_error(ours, dense_logits(state, JSON, target_state, model.config, tokens, [])[0])
        for tokens, ((ours,), *_) in zip(before, seen, strict=False)
    ]


def test_rows_that_see_too_much_would_be_noticed(model, target_state, tmp_path, monkeypatch):
    write(tmp_path, glide_state())
    assert max(first_errors(model, target_state, tmp_path)) < 1e-4
    monkeypatch.setattr(glide_rows, "visible", lambda _, verified, counts, block: np.repeat(verified, counts))
    assert max(first_errors(model, target_state, tmp_path)) > 1e-3


def test_rows_that_are_not_passed_again_would_be_noticed(model, target_state, tmp_path, monkeypatch):
    """The old root was drafted from before the target had its keys."""
    write(tmp_path, glide_state())
    unread = GlideReader.unread

    def keeps_the_root(self, requests):
        found = unread(self, requests)
        for request in requests:
            request.drafter_states[self] = len(request.tokens)
        return found

    monkeypatch.setattr(GlideReader, "unread", keeps_the_root)
    assert max(first_errors(model, target_state, tmp_path)) > 1e-3


def test_every_level_is_accepted_where_the_drafter_is_right(model, tmp_path):
    """A head of zeros drafts the lowest id, and logit biases make the target choose only that."""
    state = glide_state()
    state["lm_head.weight"].zero_()
    engine = Engine(model, drafter=f"glide:{write(tmp_path, state)},adaptive=false")
    output = engine.generate([[5, 6]], SamplingParams(max_new_tokens=20, logit_bias={0: 1e4}))[0]
    assert output.token_ids == [0] * 20 and output.stats.cycles == 4


def test_a_vocabulary_too_small_for_the_siblings_is_refused(model, tmp_path):
    folder = write(tmp_path, glide_state(d2t=torch.arange(5)))
    with pytest.raises(ValueError, match="cape: expected an integer from 1 to 5, got 8"):
        drafter_of(model, folder)
    assert drafter_of(model, folder, cape="false").drafts_chains


@pytest.fixture(scope="module")
def real(smollm2_path):
    return load_model(smollm2_path, device="cpu")


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_real_model_says_the_same(real, tmp_path, batch, params):
    c = real.config
    config = {**JSON, "vocab_size": 500, "large_hidden_size": c.hidden_size, "large_head_dim": c.head_dim}
    config["large_num_attention_heads"] = c.num_heads
    state = glide_state(config)
    for name in [name for name in state if "cross_attn" in name]:
        shape = (c.num_heads * c.head_dim, 48)
        state[name] = torch.randn(shape if "q_proj" in name else shape[::-1]) / 8
    folder = write(tmp_path, state, config)
    prompts = [[{"role": "user", "content": text}] for text in ("Name a colour.", "Count to nine.", "Hi!", "Why?")]
    drafter, params = f"glide:{folder},adaptive=false,length=2", replace(params, max_new_tokens=24)
    plain = Engine(real, drafter="none").generate(prompts, params)
    assert ids(Engine(real, drafter=drafter, max_batch_size=batch).generate(prompts, params)) == ids(plain)
