import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from specengine import Engine, SamplingParams
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_trees.rank_paths import PUBLISHED, RankTree
from specengine.drafters import load_drafter
from specengine.drafters.medusa.drafter import Medusa
from specengine.tensor_parallel.loading import load_model
from tests.drafters.dense import dense_target
from tests.drafters.medusa_files import HIDDEN, TARGET, VOCAB, heads_state, write
from tests.drafters.requests import sequence_of
from tests.drafters.steered import steer
from tests.engines import GREEDY, SAMPLED, ids, tiny_engine, tiny_model
from tests.models.files import random_state
from tests.threads import at_once

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 70)), [3, 4]]


def drafter_of(folder, **options) -> Medusa:
    options = {"adaptive": "false", **options}
    text = ",".join([f"medusa:{folder}", *(f"{name}={value}" for name, value in options.items())])
    return load_drafter(text, tiny_model().target)


def dense_logits(state, target_state, tokens, head, blocks=1, prefix=""):
    """Returns the logits of head `head` before the root, the last of `tokens`."""
    x = dense_target(target_state, TARGET, tokens).last[-2]
    for j in range(blocks):
        name = f"{prefix}{head}.{j}.linear"
        x = x + silu(state[f"{name}.weight"] @ x + state[f"{name}.bias"])
    own = f"{prefix}{head}.{blocks}.weight"
    return state.get(own, target_state.get("lm_head.weight", target_state["model.embed_tokens.weight"])) @ x


LAYOUTS = {
    "published": ({}, "medusa_lm_head.pt"),
    "safetensors": ({}, "model.safetensors"),
    "safetensors under the old name": ({}, "medusa_lm_head.safetensors"),
    "two blocks": ({"blocks": 2}, "medusa_lm_head.pt"),
    "the target's head": ({"vocab": 0}, "medusa_lm_head.pt"),
    "with the target in one file": ({"prefix": "medusa_head."}, "model.safetensors"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("in_core", [True, False], ids=["core", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chances_are_those_of_a_dense_reading_whatever_is_accepted(layout, in_core, tmp_path, monkeypatch):
    options, name = LAYOUTS[layout]
    state, target_state = heads_state(**options), random_state(TARGET)
    drafter, seen = drafter_of(write(tmp_path, state, name)), []
    if not in_core:
        drafter.native = None
    propose = Medusa.propose

    def recorded(self, requests, min_gain):
        trees = propose(self, requests, min_gain)
        own = self.calibrated  # keeps the heads' own chances
        seen.extend((list(s.tokens), s.drafter_states[own]) for s in requests if self.reader in s.drafter_states)
        return trees

    monkeypatch.setattr(Medusa, "propose", recorded)
    steer(drafter, PROMPTS, GREEDY)
    blocks, prefix, checked = options.get("blocks", 1), options.get("prefix", ""), 0
    for tokens, tree in seen:
        depths = [0]
        for parent in tree.parents[1:]:
            depths.append(depths[parent] + 1)
        expected = [dense_logits(state, target_state, tokens, head, blocks, prefix).softmax(-1) for head in range(4)]
        for token, depth, chance in list(zip(tree.tokens, depths, tree.chances, strict=True))[1:]:
            assert abs(chance - expected[depth - 1][token]) < 1e-4
        assert len(tree.tokens) == 1 or tree.tokens[1] == expected[0].argmax()
        checked += len(tree.tokens) > 1
    assert checked > 30


def test_nodes_hold_the_ranks_of_their_paths(tmp_path):
    state, target_state = heads_state(), random_state(TARGET)
    before, (tree,) = steer(drafter_of(write(tmp_path, state)), PROMPTS[:1], GREEDY).drafts[0]
    order = [dense_logits(state, target_state, before[0], head).argsort(descending=True) for head in range(4)]
    found = set()
    for node in range(1, len(tree.tokens)):
        path = []
        while node:
            path.insert(0, tree.tokens[node])
            node = tree.parents[node]
        found.add("".join(str(order[depth].tolist().index(token)) for depth, token in enumerate(path)))
    assert found == set(PUBLISHED["mc_sim_7b_63"].split())


def test_a_reduced_vocabulary_drafts_the_tokens_its_table_names(tmp_path):
    full = heads_state(vocab=VOCAB)
    kept = torch.arange(1, VOCAB, 3)
    part = {name: tensor[kept] if name.endswith("1.weight") else tensor for name, tensor in full.items()}
    part["d2t"] = kept - torch.arange(len(kept))
    before, (tree,) = steer(drafter_of(write(tmp_path, part)), PROMPTS[:1], GREEDY).drafts[0]
    expected = dense_logits(full, random_state(TARGET), before[0], 0)
    assert tree.tokens[1] == kept[expected[kept].argmax()] and set(tree.tokens[1:]) <= set(kept.tolist())


def test_engines_that_share_a_drafter_may_draft_at_once(tmp_path):
    drafter = drafter_of(write(tmp_path, heads_state()))
    rows = torch.randn(4, 1, HIDDEN, generator=torch.Generator().manual_seed(0))
    requests = [sequence_of([5, 9]) for _ in rows]
    for request, own in zip(requests, rows, strict=True):
        request.drafter_states[drafter.reader] = own
    alone = [drafter.grow([request]) for request in requests]
    drafts = at_once(lambda caller: [drafter.grow([requests[caller]]) for _ in range(200)], len(rows))
    assert all(draft == own for own, drafted in zip(alone, drafts, strict=True) for draft in drafted)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("options", [{}, {"nodes": 9}, {"adaptive": "true"}], ids=str)
def test_the_output_is_that_of_plain_decoding(tmp_path, options, batch, params):
    plain = ids(tiny_engine("none").generate(PROMPTS, params))
    folder = write(tmp_path, heads_state(vocab=0))
    text = ",".join([f"medusa:{folder}", *(f"{name}={value}" for name, value in options.items())])
    engine = tiny_engine(text, max_batch_size=batch)
    assert ids(engine.generate(PROMPTS, params)) == plain


def test_every_level_is_accepted_where_the_heads_are_right(tmp_path):
    """Heads of zeros draft the lowest ids, and logit biases make the target choose only the lowest."""
    state = {name: torch.zeros_like(tensor) for name, tensor in heads_state().items()}
    engine = tiny_engine(f"medusa:{write(tmp_path, state)},adaptive=false")
    output = engine.generate([[5, 6]], SamplingParams(max_new_tokens=20, logit_bias={0: 1e4}))[0]
    assert output.token_ids == [0] * 20 and output.stats.cycles == 4


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (heads_state(hidden=32), r"'0.0.linear.weight' has shape \(32, 32\), expected \(64, 64\)"),
        (heads_state(vocab=VOCAB + 1), "head 0 tells 321 tokens apart, the target has 320"),
        ({"fc.weight": torch.zeros(4, 4)}, "holds no Medusa heads"),
        ({k: v for k, v in heads_state().items() if k != "1.0.linear.weight"}, "'1.0.linear.weight' is missing"),
        (heads_state() | {"3.1.weight": torch.zeros(300, HIDDEN)}, r"different vocabularies: \[300, 320\]"),
        (heads_state() | {"d2t": torch.full((VOCAB,), VOCAB)}, "leads to token 639, the target has 320"),
        (heads_state() | {"d2t": torch.zeros(3, 3, dtype=torch.int64)}, r"^drafter: .*'d2t' has shape \(3, 3\)"),
        (heads_state() | {"d2t": torch.zeros(0, dtype=torch.int64)}, r"^drafter: .*'d2t' has shape \(0,\)"),
        (heads_state() | {"d2t": torch.full((VOCAB,), -1)}, "leads to token -1, the target has 320"),
        (heads_state() | {"2.1.weight": torch.tensor(1.0)}, r"'2.1.weight' has shape \(\), expected \[rows, columns\]"),
        (heads_state() | {"2.0.linear.bias": torch.zeros(3)}, r"'2.0.linear.bias' has shape \(3,\), expected \(64,\)"),
        (heads_state() | {"d2t": -torch.arange(VOCAB)}, "leads to a target token twice"),
    ],
)
def test_heads_of_another_target_are_refused(tmp_path, state, message):
    with pytest.raises(ValueError, match=message):
        drafter_of(write(tmp_path, state))


def test_fewer_heads_or_nodes_cut_the_tree(tmp_path):
    folder = write(tmp_path, heads_state(heads=2))
    assert drafter_of(folder).max_nodes == 1 + sum(len(word) < 3 for word in PUBLISHED["mc_sim_7b_63"].split())
    assert drafter_of(folder, nodes=5).max_nodes == 5


def test_a_tree_may_come_from_a_file(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [1], [0, 0], [0, 0, 0]]))
    drafter = drafter_of(write(tmp_path / "heads", heads_state()), tree=file)
    assert drafter.max_nodes == 5
    (tree,) = steer(drafter, PROMPTS[:1], GREEDY).drafts[0][1]
    assert list(tree.parents) == [-1, 0, 0, 1, 3] and len(set(tree.tokens[1:3])) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0, 0]]", "before its parent"),
        ("[[0], [0]]", "twice"),
        ("[[-1]]", "ranks from 0"),
        ("[]", "1 to 255 paths"),
        ("7", "no JSON list"),
        ("[", "no JSON list"),
        ("[" * 100_000, "no JSON list"),
    ],
)
def test_lists_that_are_no_tree_are_refused(tmp_path, text, message):
    (tmp_path / "tree.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        RankTree.named(str(tmp_path / "tree.json"))


def test_an_unknown_tree_is_refused_by_name():
    with pytest.raises(ValueError, match="mc_sim_7b_63"):
        RankTree.named("oak")


def test_a_pass_that_costs_much_per_row_is_not_made_wide(tmp_path):
    dear = CycleCosts({1: 1.0, 2: 2.0})
    drafter = drafter_of(write(tmp_path, heads_state()))
    adaptive = Medusa(type(drafter.config)(adaptive=True), str(tmp_path), tiny_model().target, costs=dear)
    assert max(len(tree.tokens) for _, trees in steer(adaptive, PROMPTS, GREEDY).drafts for tree in trees) < 4


def test_a_vocabulary_too_small_for_the_tree_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tree: ranks: expected an integer from 1 to 5, got 10"):
        drafter_of(write(tmp_path, heads_state(vocab=5)))


@pytest.fixture(scope="module")
def model(smollm2_path):
    return load_model(smollm2_path, device="cpu")


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_real_model_says_the_same(model, tmp_path, batch, params):
    folder = write(tmp_path, heads_state(heads=3, vocab=0, hidden=model.config.hidden_size))
    prompts = [[{"role": "user", "content": text}] for text in ("Name a colour.", "Count to nine.", "Hi!", "Why?")]
    drafter, params = f"medusa:{folder},adaptive=false,nodes=8", replace(params, max_new_tokens=24)
    plain = Engine(model, drafter="none").generate(prompts, params)
    assert ids(Engine(model, drafter=drafter, max_batch_size=batch).generate(prompts, params)) == ids(plain)
