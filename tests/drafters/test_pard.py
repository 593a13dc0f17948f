"""PARD and PARD-2: what they draft, and that no text changes."""

import dataclasses
import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

from specengine import Engine, SamplingParams
from specengine.drafters import load_drafter
from specengine.models.transformer import Transformer
from tests.drafters.eagle_bench import PROMPTS, Bench
from tests.drafters.one_pass_trees import TREES
from tests.drafters.pard_files import ORDER, Reading, pard_state, warp_state, write_pard
from tests.drafters.requests import path_to
from tests.engines import ids, tiny_engine, tiny_model
from tests.models.files import CONFIG_JSON, random_state

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
GREEDY = SamplingParams(max_new_tokens=24)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)
COMMITTED = ([[1, 2, 3], [8], [9, 9], [30, 31]], [[6], [2, 8, 5], [7], [1]], [[5, 4, 3, 2], [1], [2], [3]])
CHAIN = "tree=chain,length=4,adaptive=false"
KINDS = {"PARD": False, "PARD-2": True}
HIDDEN = tiny_model().config.hidden_size


def spec_of(folder, features):
    return f"pard:{write_pard(folder / 'pard', warp_state(HIDDEN) if features else None)}"


def reading_of(features):
    return Reading(pard_state(), warp_state(HIDDEN) if features else None)


def check_chains(bench, reading, order=ORDER, drafts=None):
    """Every request's chain is the reading's, in every cycle."""
    for committed in (None, *COMMITTED):
        if committed:
            bench.commit(committed)
        for request, tree in zip(bench.requests, bench.drafter.draft(bench.requests).trees, strict=True):
            features = reading.features(bench.hidden_states(request.tokens), order)
            logits = reading.logits(request.tokens, features, 4)
            assert tree.tokens[1:] == logits.argmax(-1).tolist() and tree.parents == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("features", KINDS.values(), ids=KINDS)
def test_it_drafts_the_chain_of_a_straight_line_reading(tmp_path, features):
    check_chains(Bench(spec_of(tmp_path, features), PROMPTS, CHAIN), reading_of(features))


def test_without_features_pard2_drafts_as_pard_does(tmp_path):
    bench = Bench(spec_of(tmp_path, True), PROMPTS, f"{CHAIN},features=false")
    assert bench.drafter.hidden_state_layers == () and not bench.drafter.reads_hidden_states
    check_chains(bench, reading_of(False))


class Unshifted(Reading):
    """Every token has its own feature, which no engine could know of the root."""

    def logits(self, tokens, features, length):
        return super().logits(tokens, features[1:], length)


class NoFeatureOfMasks(Reading):
    def logits(self, tokens, features, length):
        first = super().logits(tokens, features, 1)
        blank = Reading(self.state).logits(tokens, features, length)
        return torch.cat([first, blank[1:]])


class FirstRowLeftOut(Reading):
    def logits(self, tokens, features, length):
        return (
            super().logits(tokens[1:], features[1:], length)
            if len(tokens) > 2
            else super().logits(tokens, features, length)
        )


WRONG = {
    "features of the same position": (Unshifted, ORDER),
    "masks without features": (NoFeatureOfMasks, ORDER),
    "no first row": (FirstRowLeftOut, ORDER),
    "rising layers": (Reading, sorted(ORDER)),
    "one layer off": (Reading, [-2, 1, -3]),
}


@pytest.mark.parametrize("kind, order", WRONG.values(), ids=WRONG)
def test_another_convention_would_be_noticed(tmp_path, kind, order):
    bench = Bench(spec_of(tmp_path, True), PROMPTS, CHAIN)
    with pytest.raises(AssertionError):
        check_chains(bench, kind(pard_state(), warp_state(HIDDEN)), order)


def test_the_last_state_is_read_behind_the_final_norm(tmp_path):
    class Unnormed(Reading):
        def features(self, hidden_states, order=ORDER):
            states = hidden_states.at_layers.unbind(1)
            return torch.cat([states[number] for number in order], -1).double()

    target = tiny_model().target
    weights = dataclasses.replace(target.weights, final_norm=0.5 + 2 * torch.rand(HIDDEN))
    scaled = Transformer(weights, target.device, target.ops)
    reading = Reading(pard_state(), warp_state(HIDDEN))
    check_chains(Bench(spec_of(tmp_path, True), PROMPTS, CHAIN, scaled), reading)
    with pytest.raises(AssertionError):
        check_chains(Bench(spec_of(tmp_path, True), PROMPTS, CHAIN, scaled), Unnormed(pard_state(), warp_state(HIDDEN)))


def paths(tree):
    return {tuple(path_to(tree, node)) for node in range(1, len(tree.tokens))}


def test_a_ddtree_has_the_likeliest_paths_of_the_levels_distributions(tmp_path):
    bench, reading = Bench(spec_of(tmp_path, True), PROMPTS, "length=3,nodes=24,adaptive=false"), reading_of(True)
    for request, tree in zip(bench.requests, bench.drafter.draft(bench.requests).trees, strict=True):
        features = reading.features(bench.hidden_states(request.tokens))
        levels = [dict(enumerate(row)) for row in reading.logits(request.tokens, features, 3).log_softmax(-1).tolist()]
        best = [sorted(level, key=level.get)[-24:] for level in levels]
        scores = {
            path: sum(level[token] for level, token in zip(levels, path, strict=False))
            for depth in (1, 2, 3)
            for path in itertools.product(*best[:depth])
        }
        assert paths(tree) == {*sorted(scores, key=scores.get)[-23:]}


def test_a_jetspec_tree_gives_the_likeliest_nodes_all_their_children(tmp_path):
    bench, reading = (
        Bench(spec_of(tmp_path, False), PROMPTS, "tree=jetspec,top_k=3,length=3,nodes=14,adaptive=false"),
        reading_of(False),
    )
    for request, tree in zip(bench.requests, bench.drafter.draft(bench.requests).trees, strict=True):
        best = reading.logits(request.tokens, torch.zeros(len(request.tokens), 0), 3).topk(3).indices.tolist()
        counts = [tree.parents.count(node) for node in range(len(tree.tokens))]
        assert len(tree.tokens) == 14 and {*counts} <= {0, 1, 3} and counts.count(1) == 1
        for path in paths(tree):
            assert all(token in level for token, level in zip(path, best, strict=False))


@pytest.mark.quick(6)
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", TREES.values(), ids=TREES)
@pytest.mark.parametrize("features", KINDS.values(), ids=KINDS)
def test_no_token_changes(tmp_path, features, options, params, batch):
    engine = tiny_engine(f"{spec_of(tmp_path, features)},{options}", max_batch_size=batch)
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, params))
    assert engine.cache.pages_in_use == 0
    if "adaptive=false" in options:
        assert all(output.stats.acceptance_by_depth for output in outputs)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_target_itself_drafts_the_first_token_right(tmp_path, params):
    state = random_state(tiny_model().config)
    folder = write_pard(tmp_path / "own", state=state)
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | {"pard_token": 7}))
    engine = tiny_engine(f"pard:{folder},length=3,nodes=3,adaptive=false")
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, params))
    if not params.temperature:
        assert all(output.stats.acceptance_by_depth[0] == 1 for output in outputs)


@pytest.mark.parametrize("features", KINDS.values(), ids=KINDS)
def test_it_is_a_part_of_combine(tmp_path, features):
    spec = f"combine:prompt_lookup+{spec_of(tmp_path, features)};length=3,adaptive=false"
    outputs = tiny_engine(spec).generate(PROMPTS, GREEDY)
    assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, GREEDY))
    assert sum(output.stats.sources["pard"].drafted for output in outputs) > 0


@pytest.mark.parametrize("features", KINDS.values(), ids=KINDS)
def test_it_drafts_nothing_for_requests_that_its_policy_does_not_read(tmp_path, monkeypatch, features):
    engine = tiny_engine(f"{spec_of(tmp_path, features)},adaptive=false", max_batch_size=4)
    answers = iter([True, False, True, False])
    monkeypatch.setattr(engine.drafter.policy, "reads", lambda *_: next(answers))
    outputs = engine.generate(PROMPTS, GREEDY)
    assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, GREEDY))
    assert [bool(output.stats.acceptance_by_depth) for output in outputs] == [True, False, True, False]


def test_the_projection_may_lie_in_a_safetensors_file(tmp_path):
    spec = spec_of(tmp_path, True)
    bench = Bench(spec, PROMPTS, CHAIN)
    (tmp_path / "pard" / "warp_model.bin").unlink()
    save_file(warp_state(HIDDEN), tmp_path / "pard" / "warp_model.safetensors")
    other = Bench(spec, PROMPTS, CHAIN)
    drafts = [[tree.tokens for tree in each.drafter.draft(each.requests).trees] for each in (bench, other)]
    assert drafts[0] == drafts[1]


def test_a_bias_of_the_projection_counts(tmp_path):
    warp = warp_state(HIDDEN) | {"target_proj.bias": torch.full((48,), 3.0)}
    spec = f"pard:{write_pard(tmp_path / 'pard', warp, pard2_proj_bias=True)}"
    biased, plain = (Bench(each, PROMPTS, CHAIN) for each in (spec, spec_of(tmp_path / "plain", True)))
    drafts = [[tree.tokens for tree in each.drafter.draft(each.requests).trees] for each in (biased, plain)]
    assert drafts[0] != drafts[1]


REFUSED = {
    "no mask token": ({"pard_token": None}, "field 'pard_token' is missing; expected a model trained with PARD"),
    "mask token": ({"pard_token": 320}, "'pard_token' must be a token from 0 to 319, got 320"),
    "kind": ({"spd_type": "pard3"}, "field 'spd_type' must be pard or pard2, got 'pard3'"),
    "layers": ({"pard2_target_layers": [-9]}, r"'pard2_target_layers' must be numbers from -3 to 2, .* got \[-9\]"),
    "no layers": ({"pard2_target_layers": None}, "'pard2_target_layers' is missing"),
    "columns": ({"pard2_target_dim": 4096}, "'pard2_target_dim' is 4096, but 3 layers of the target have 192 columns"),
    "shape": ({"pard2_target_layers": [-1]}, r"'target_proj.weight' has shape \(48, 192\), expected \(48, 64\)"),
    "bias": ({"pard2_proj_bias": True}, "'pard2_proj_bias' contradicts the tensors: 'target_proj.bias' is missing"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path, changes, message):
    folder = write_pard(tmp_path / "pard", warp_state(HIDDEN), **changes)
    with pytest.raises(ValueError, match=f"^drafter: .*{message}"):
        load_drafter(f"pard:{folder}", tiny_model().target)


def test_a_missing_projection_is_refused_and_told_of_the_way_without(tmp_path):
    folder = write_pard(tmp_path / "pard", warp_state(HIDDEN))
    (folder / "warp_model.bin").unlink()
    with pytest.raises(ValueError, match=r"tensor 'target_proj.weight' is missing; .* features=false"):
        load_drafter(f"pard:{folder}", tiny_model().target)
    load_drafter(f"pard:{folder},features=false", tiny_model().target)


OPTIONS = {
    "tree=chains": "tree: expected one of ddtree, jetspec, chain, got 'chains'",
    "length=0": "length: expected an integer from 1 to",
    "nodes=1": "nodes: expected an integer from 2 to",
    "top_k=0": "top_k: expected an integer from 1 to",
}


@pytest.mark.parametrize("options, message", OPTIONS.items())
def test_a_wrong_option_is_named(tmp_path, options, message):
    with pytest.raises(ValueError, match=f"^drafter: pard: {message}"):
        load_drafter(f"pard:{tmp_path},{options}", tiny_model().target)


def test_other_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="pard:PATH takes a model that was trained with PARD"):
        load_drafter("pard", tiny_model().target)
    with pytest.raises(ValueError, match=r"expected a folder with config\.json, which names pard_token"):
        load_drafter(f"pard:{tmp_path}", tiny_model().target)


def test_two_engines_do_not_share_it(tmp_path):
    drafter = load_drafter(f"{spec_of(tmp_path, False)},{CHAIN}", tiny_model().target)
    Engine(tiny_model(), drafter=drafter)
    with pytest.raises(ValueError, match="pard belongs to another engine"):
        Engine(tiny_model(), drafter=drafter)
