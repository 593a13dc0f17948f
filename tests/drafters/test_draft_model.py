import json
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import tokenizers
import torch

from specengine import Engine, SamplingParams
from specengine.cache import kv_cache
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftLogits, DraftTree, TreeBatch
from specengine.drafters import check_offers, load_drafter
from specengine.drafters.draft_model.drafter import Config, DraftModel
from specengine.drafters.draft_model.small_model import State
from specengine.drafters.prompt_lookup.drafter import PromptLookup
from specengine.engine.batch import Batch
from specengine.engine.cycle import Cycle
from specengine.engine.device.buffers import BufferSizes, DeviceBuffers
from specengine.engine.device.graph_batch import GraphBatch
from specengine.engine.request import Request
from specengine.ops import native, row_tools
from specengine.ops.row_tools import confidence, likeliest, stack_rows, take_rows
from specengine.rules.base import Wants
from specengine.rules.lossless import Match
from specengine.tensor_parallel.loading import load_model
from specengine.tokenizer import Tokenizer
from specengine.tokenizer.vocabulary import Vocabulary
from tests.drafters.requests import GREEDY, path_to, sequence_of, with_logits
from tests.drafters.steady import steady
from tests.engines import tiny_engine, tiny_model
from tests.models.files import CONFIG_JSON, random_state, write_folder

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 70))]
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=3)
SPECS = {
    "own first layer": "draft-model:self,layers=1,adaptive=false",
    "own layers": "draft-model:self,layers=2,length=6,adaptive=false",
    "own layers, tree": "draft-model:self,layers=2,tree=3x2x1,adaptive=false",
    "other model": "draft-model:random:tiny-qwen2,adaptive=false",
    "other model, tree": "draft-model:random:tiny-qwen2,layers=1,tree=2x2,confidence=0.02,adaptive=false",
}


def test_a_small_model_s_cache_gives_its_memory_back_with_the_target_s(monkeypatch):
    monkeypatch.setattr(kv_cache, "IDLE_BYTES", 0)
    engine = Engine(tiny_model(), drafter=SPECS["other model"], prefix_cache_mib=0)
    engine.generate(PROMPTS, GREEDY)
    assert engine.cache.pages_with_memory == engine.drafter.small.cache.pages_with_memory == 0


def test_a_small_model_s_cache_serves_one_engine():
    """Two engines would write into it in turns that do not exclude each other."""
    model, drafter = tiny_model(), drafter_of()
    Engine(model, drafter=drafter)
    with pytest.raises(ValueError, match=r"^drafter: draft_model belongs to another engine; make one for each engine"):
        Engine(model, drafter=drafter)


def drafter_of(spec="self,layers=2", **options) -> DraftModel:
    text = ",".join([f"draft-model:{spec}", "adaptive=false", *(f"{name}={value}" for name, value in options.items())])
    return load_drafter(text, tiny_model().target)


def ids(outputs):
    return [output.token_ids for output in outputs]


def plain_logits(model, tokens) -> torch.Tensor:
    """Returns the model's logits behind these tokens, float32 [V], from an empty cache."""
    cache = model.new_cache()
    out = model.forward(TreeBatch.chains([tokens], CPU), cache, cache.batch([cache.allocate(len(tokens))], [0]))
    return out.scores[-1]


@pytest.fixture
def passes(monkeypatch):
    """Watches a model: the rows of each of its passes, by request."""

    def watch(model) -> list[list[int]]:
        seen, hidden = [], model.hidden

        def counted(rows, *rest):
            seen.append(rows.row_start.diff().tolist())
            return hidden(rows, *rest)

        monkeypatch.setattr(model, "hidden", counted)
        return seen

    return watch


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_text_is_that_of_plain_decoding(spec, params):
    plain = tiny_engine("none").generate(PROMPTS, params)
    for batch in (1, 3):
        engine = tiny_engine(spec, max_batch_size=batch)
        assert ids(engine.generate(PROMPTS, params)) == ids(plain)
        assert engine.drafter.small.cache.pages_in_use == engine.cache.pages_in_use == 0


def test_a_draft_by_the_whole_target_is_accepted_whole():
    for spec, levels in ((SPECS["own layers"], 6), (SPECS["own layers, tree"], 3)):
        for output in tiny_engine(spec).generate(PROMPTS, SamplingParams(max_new_tokens=levels * 3 + 3)):
            assert output.stats.tau == levels + 1 and output.stats.acceptance_by_depth == [1.0] * levels


SHAPED = [  # what each parameter does to the target's rows it must do to the draft's
    SAMPLED,
    SamplingParams(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.4, seed=1),
    SamplingParams(temperature=0.9, top_k=8, min_p=0.05, frequency_penalty=0.5, logit_bias={3: 4.0}, seed=2),
]


@pytest.mark.parametrize("options", ["length=6", "tree=3x2x1"])
def test_the_whole_target_drafts_its_own_draws_with_the_noise_of_match(options):
    params = [replace(each, max_new_tokens=29) for each in SHAPED]
    taus = {}
    for noise in (0, 0.5, 1):
        engine = tiny_engine(f"draft-model:self,layers=2,adaptive=false,{options},noise={noise}")
        outputs = engine.generate(PROMPTS, params)
        assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, params))
        taus[noise] = [output.stats.tau for output in outputs]
    assert set(taus[1]) == {29 / -(-29 // (len(engine.drafter.config.widths) + 1))}
    assert max(*taus[0], *taus[0.5]) < min(taus[1]) and sum(taus[0]) < sum(taus[0.5])


def test_a_batch_of_all_temperatures_and_depths_is_drafted_as_its_requests_are_alone():
    drafter = drafter_of(tree="3x2x1")

    def requests() -> list[Request]:
        kinds = [GREEDY, *SHAPED, replace(GREEDY, logit_bias={7: 9.0})]
        limits = (9, 2, 1, 9, 3)
        return [sequence_of(PROMPTS[i % 3], limits[i], params) for i, params in enumerate(kinds)]

    together = drafter.draft(requests()).trees
    assert together == [drafter.draft([request]).trees[0] for request in requests()]
    depths = [max(len(path_to(tree, node)) for node in range(len(tree.tokens))) for tree in together]
    assert depths == [3, 1, 0, 3, 2]
    likeliest_alone = drafter_of(tree="3x2x1", noise=0).draft(requests()).trees
    assert [a == b for a, b in zip(together, likeliest_alone, strict=True)] == [True, False, True, False, True]


def test_siblings_with_the_noise_of_match_differ_and_are_what_filters_leave():
    hot = SamplingParams(temperature=1.0, top_k=4, seed=5)
    (tree,) = drafter_of(tree="6").draft([sequence_of(PROMPTS[0], params=hot)]).trees
    drawn = tree.tokens[1:]
    assert len(set(drawn)) == len(drawn) == 4
    best = drafter_of(tree="6").draft([sequence_of(PROMPTS[0])]).trees[0].tokens[1:5]
    assert set(drawn) == set(best) and drawn != best


def test_the_confidence_ends_drafts_with_the_noise_of_match_too():
    drafter = drafter_of(length=4)
    chains = [tree.tokens for tree in drafter.draft([sequence_of(prompt, params=SAMPLED) for prompt in PROMPTS]).trees]
    tops = [
        [plain_logits(drafter.model, [*prompt, *chain[1 : i + 1]]).softmax(-1).max().item() for i in range(4)]
        for prompt, chain in zip(PROMPTS, chains, strict=True)
    ]
    low, high = sorted(top for own in tops for top in own)[5:7]
    least = (low + high) / 2
    cut = (
        drafter_of(length=4, confidence=least).draft([sequence_of(prompt, params=SAMPLED) for prompt in PROMPTS]).trees
    )
    sure = [next((i for i, top in enumerate(own) if top < least), 4) for own in tops]
    assert [tree.tokens for tree in cut] == [chain[: 1 + i] for chain, i in zip(chains, sure, strict=True)]
    assert 0 < sum(sure) < 12


@pytest.mark.parametrize("options", [{"length": 4}, {"tree": "3x2x1"}], ids=["chain", "tree"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_every_distribution_is_the_models_own_at_its_node(options, sampled):
    drafter = drafter_of("self,layers=1", **options)
    requests = [sequence_of(prompt, params=SAMPLED) for prompt in PROMPTS]
    trees, logits = with_logits(drafter, requests, sampled)
    rows = iter(logits.rows.tolist())
    known = 0
    for request, tree in zip(requests, trees, strict=True):
        for node in range(len(tree.tokens)):
            row = next(rows)
            assert (row >= 0) == (node in tree.parents)
            if row >= 0:
                known += 1
                tokens = [*request.tokens, *path_to(tree, node)]
                assert logits.logits[row].equal(plain_logits(drafter.model, tokens))
    assert known == len(logits.logits) and next(rows, None) is None


def run_cycles(drafter, requests, cycles=6):
    """Commits some of each tree and a bonus token, which sometimes was drafted; once only tokens that were not."""
    for cycle in range(cycles):
        for number, (request, tree) in enumerate(zip(requests, drafter.draft(requests).trees, strict=True)):
            path = path_to(tree, len(tree.tokens) - 1)
            kept = (cycle + number) % (len(path) + 1)
            bonus = path[kept] if kept < len(path) and cycle % 3 == 2 else 40 + cycle
            request.commit([41, 42, 43] if cycle == cycles - 1 else path[:kept], bonus)


def continued(drafter, prompts=PROMPTS):
    """Logits of a drafter after several cycles, and those of a new one at the same tokens."""
    requests = [sequence_of(prompt) for prompt in prompts]
    run_cycles(drafter, requests)
    used = with_logits(drafter, requests, sampled=False)
    fresh = DraftModel(drafter.config, "self", tiny_model().target)
    return used, with_logits(fresh, [sequence_of(request.tokens) for request in requests], sampled=False)


@pytest.mark.parametrize("options", [{"length": 4}, {"tree": "3x2x1"}], ids=["chain", "tree"])
def test_what_was_not_accepted_leaves_no_trace_in_the_cache(options):
    (trees, logits), (expected_trees, expected) = continued(drafter_of("self,layers=2", **options))
    assert trees == expected_trees
    assert logits.logits.equal(expected.logits) and logits.rows.equal(expected.rows)


def test_a_cache_that_is_not_rolled_back_would_be_seen(monkeypatch):
    def keeps_all(state, tokens):
        state.cached, state.ahead = min(state.cached + len(state.ahead), len(tokens) - 1), []

    monkeypatch.setattr(State, "settle", keeps_all)
    (_, logits), (_, expected) = continued(drafter_of("self,layers=2"))
    assert not logits.logits.equal(expected.logits)


def test_catching_up_and_the_first_level_are_one_pass(passes):
    drafter = drafter_of(length=3)
    rows = passes(drafter.model)
    requests = [sequence_of(prompt) for prompt in PROMPTS]
    trees = drafter.draft(requests).trees
    assert rows == [[len(prompt) for prompt in PROMPTS], [1, 1, 1], [1, 1, 1]]
    rows.clear()
    for kept, request, tree in zip((3, 1, 0), requests, trees, strict=True):
        request.commit(tree.tokens[1 : kept + 1], 50)
    drafter.draft(requests)
    assert rows == [[2, 1, 1], [1, 1, 1], [1, 1, 1]]  # the last node's own keys were not known


def test_a_pass_has_the_rows_of_one_level(passes):
    drafter = drafter_of(tree="3x2x1")
    rows = passes(drafter.model)
    (tree,) = drafter.draft([sequence_of(PROMPTS[0])]).trees
    assert rows == [[5], [3], [6]] and len(tree.tokens) == drafter.max_nodes == 16
    assert tree.parents == [-1, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 9]


def test_a_long_prompt_is_passed_in_pieces(passes):
    drafter, step = drafter_of(length=1), native.prefill_rows
    rows = passes(drafter.model)
    requests = [sequence_of([3] * 300), sequence_of([4] * 5)]
    drafter.draft(requests)
    assert rows == [[300 - step // 2], [step // 2, 5]]


def test_pages_are_given_back_whatever_ends_a_sequence():
    engine = tiny_engine("draft-model:self,layers=1,adaptive=false")
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert engine.drafter.small.cache.pages_in_use > 0
    stream.close()
    assert engine.drafter.small.cache.pages_in_use == 0
    request = sequence_of([1, 2])
    engine.drafter.draft([request])
    for _ in range(2):  # twice does no harm
        engine.drafter.release(request)
    assert engine.drafter.small.cache.pages_in_use == 0


def test_nothing_is_drafted_behind_a_node_the_model_is_unsure_of():
    requests = [sequence_of(prompt) for prompt in PROMPTS]
    all_logits = with_logits(drafter_of(tree="3x2x1"), requests, sampled=False)[1].logits
    median = all_logits.softmax(-1).amax(-1).median().item()
    requests = [sequence_of(prompt) for prompt in PROMPTS]
    trees, logits = with_logits(drafter_of(tree="3x2x1", confidence=median), requests, sampled=False)
    rows, stopped, went_on = iter(logits.rows.tolist()), 0, 0
    for tree in trees:
        for node in range(len(tree.tokens)):
            row = next(rows)
            if row >= 0:  # of unsure nodes too
                likeliest = logits.logits[row].softmax(-1).max().item()
                sure = node in tree.parents
                assert likeliest >= median - 1e-6 if sure else likeliest <= median + 1e-6
                stopped, went_on = stopped + (not sure), went_on + sure
    assert stopped and went_on
    trees, logits = with_logits(drafter_of(confidence=1.0), [sequence_of(PROMPTS[0])], sampled=False)
    assert trees == [DraftTree([9], [-1])] and logits.rows.tolist() == [0]


@pytest.mark.parametrize("options", [{"length": 4}, {"tree": "2x2x2"}], ids=["chain", "tree"])
def test_no_tree_is_deeper_than_its_sequence_needs(options):
    drafter = drafter_of(**options)
    requests = [sequence_of(PROMPTS[0], limit) for limit in (1, 3, 9)]
    trees, logits = with_logits(drafter, requests, sampled=False)
    depths = [max(len(path_to(tree, node)) for node in range(len(tree.tokens))) for tree in trees]
    assert [s.draft_limit for s in requests] == [0, 2, 8] and depths == [0, 2, len(drafter.config.widths)]
    assert logits.rows[0] == -1 and not requests[0].drafter_states
    trees, logits = with_logits(drafter, requests[:1], sampled=True)
    assert trees == [DraftTree([9], [-1])] and logits.logits.shape == (0, 320)


def test_a_context_shorter_than_the_targets_ends_the_drafting_and_nothing_else(tmp_path):
    folder = write_folder(tmp_path / "short", random_state(tiny_model().config))
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | {"max_position_embeddings": 16}))
    for options in ("", ",tree=2x1x1"):
        engine = tiny_engine(f"draft-model:{folder},adaptive=false{options}")
        outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, trace=True))
        assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, GREEDY))
        for output in outputs:
            length = len(output.prompt_token_ids)
            for cycle in output.trace:
                depth = max(len(path_to(cycle, node)) for node in range(len(cycle.tokens)))
                assert length - 1 + max(0, depth - 1) < 16 or depth == 0
                length += len(cycle.accepted) + 1
            assert output.prompt_token_ids == PROMPTS[2] or output.stats.tau > 1


def test_drawn_siblings_differ_unless_they_are_drawn_with_replacement():
    hot = SamplingParams(temperature=1.0, top_k=4, seed=5)
    (tree,) = with_logits(drafter_of(tree="6"), [sequence_of(PROMPTS[0], params=hot)], sampled=True)[0]
    assert len(tree.tokens) == 5 and len(set(tree.tokens[1:])) == 4  # there are no more
    drafter = drafter_of(tree="6", replacement=True)
    (tree,), logits = with_logits(drafter, [sequence_of(PROMPTS[0], params=hot)], sampled=True)
    assert len(tree.tokens) == 7 and len(set(tree.tokens[1:])) <= 4 and logits.replacement
    cold = with_logits(drafter_of(tree="6"), [sequence_of(PROMPTS[0])], sampled=True)[0]
    assert cold == drafter_of(tree="1").draft([sequence_of(PROMPTS[0])]).trees


def test_what_is_drawn_depends_on_the_sequence_alone():
    drafter = drafter_of(tree="3x2")
    together = with_logits(drafter, [sequence_of(prompt, params=SAMPLED) for prompt in PROMPTS], True)[0]
    alone = [with_logits(drafter, [sequence_of(p, params=SAMPLED)], sampled=True)[0][0] for p in PROMPTS]
    assert together == alone
    other = SamplingParams(temperature=0.8, top_p=0.95, seed=4)
    assert with_logits(drafter, [sequence_of(PROMPTS[0], params=other)], sampled=True)[0] != alone[:1]


@pytest.mark.parametrize("where", ["numpy", "torch"])
def test_of_equally_likely_children_the_lower_token_comes_first(where, monkeypatch):
    if where == "torch":
        monkeypatch.setattr(row_tools, "_array", lambda tensor: tensor)
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert likeliest(logits, 4) == [[1, 2, 4, 3], [0, 1, 2, 3]]
    assert likeliest(logits, 1) == [[1], [0]]
    assert confidence(logits) == pytest.approx(logits.softmax(-1).amax(-1).tolist(), abs=1e-6)
    assert stack_rows([logits, logits[1:]]).equal(logits[[0, 1, 1]])
    assert take_rows(logits, [1, 0, 1]).equal(logits[[1, 0, 1]])


def test_a_batch_hands_over_what_its_rule_wants():
    model, drafter = tiny_model(), drafter_of("self,layers=1", tree="2x1")
    requests = [sequence_of(prompt, params=SAMPLED) for prompt in PROMPTS[:2]]
    cache = model.target.new_cache()
    batch = Batch(requests, Cycle(model.target, cache, drafter, Match()))
    assert batch.draft(drafter, SimpleNamespace(wants=Wants.NOTHING)).nodes == 5 and batch.draft_logits is None
    for wants in (Wants.SAMPLES, Wants.SAMPLED_ONLY, Wants.PROBABILITIES):
        tree = batch.draft(drafter, SimpleNamespace(wants=wants))
        chosen, logits = with_logits(drafter, requests, sampled=wants is not Wants.PROBABILITIES)
        assert tree.tokens.tolist() == [token for each in chosen for token in each.tokens]
        assert batch.draft_logits.logits.equal(logits.logits) and batch.draft_logits.rows.equal(logits.rows)
    lookup = load_drafter("prompt_lookup,adaptive=false", model.target)
    batch = Batch([sequence_of(PROMPTS[0])], Cycle(model.target, cache, lookup, Match()))
    batch.draft(lookup, SimpleNamespace(wants=Wants.SAMPLES))
    assert batch.draft_logits is None


@pytest.mark.parametrize("places", [[0, 1], [2, 0]])
@pytest.mark.parametrize("width", [3, 5])
def test_slots_of_any_width_hold_the_distributions_of_the_nodes_they_take(width, places):
    drafter = drafter_of("self,layers=1", tree="2x1")
    drafter.drafts_in_cycle = False
    state = DeviceBuffers(BufferSizes(4, 64, 5, 4 * width, 320), [], CPU, drafter.room_for_logits(4 * width))
    slots = GraphBatch(state, 3, width)
    requests = [sequence_of(prompt) for prompt in PROMPTS[:2]]  # one slot is idle
    for _ in range(2):
        trees, logits = with_logits(drafter, requests, sampled=False)
        slots.take(Draft(requests, trees, logits), places)
        tree = slots.draft(drafter, SimpleNamespace(wants=Wants.PROBABILITIES))
        tokens, rows = [[-1] * width] * 3, [[-1] * width] * 3
        for b, place in enumerate(places):
            tokens[place] = list(trees[b].tokens[:width])
            rows[place] = logits.rows[5 * b : 5 * b + width].tolist()
        assert tree.tokens.tolist() == [*chain(*tokens)]
        taken, expected = slots.draft_logits.rows.tolist(), [*chain(*rows)]
        assert [row >= 0 for row in taken] == [row >= 0 for row in expected]
        for row, source in zip(taken, expected, strict=True):
            assert row < 0 or slots.draft_logits.logits[row].equal(logits.logits[source])
        for request in requests:
            request.commit([], 33)


def test_a_rule_that_a_drafter_cannot_serve_is_refused_with_those_that_can():
    lookup = load_drafter("prompt_lookup,adaptive=false", tiny_model().target)
    check_offers(lookup, "any", Wants.SAMPLES)
    for wants in Wants:
        check_offers(drafter_of(), "any", wants)
    for wants, needs in ((Wants.PROBABILITIES, "draft logits"), (Wants.SAMPLED_ONLY, "children sampled from")):
        with pytest.raises(
            ValueError,
            match=rf"^rule: mixed needs {needs}.* prompt_lookup .*: (?!.*lookup).*draft_model.*eagle3",
        ):
            check_offers(lookup, "mixed", wants)
    assert Wants.PROBABILITIES not in PromptLookup.offers


def test_an_engine_refuses_a_rule_its_drafter_cannot_serve(monkeypatch):
    monkeypatch.setattr("specengine.rules.Match.wants", Wants.PROBABILITIES)
    with pytest.raises(ValueError, match=r"^rule: match needs draft logits, which drafter none does not give"):
        tiny_engine("none")
    outputs = tiny_engine("draft-model:self,layers=1,adaptive=false").generate(PROMPTS, GREEDY)
    assert len(outputs[0].token_ids) == 24


def test_first_layers_share_the_memory_of_the_model():
    model = load_model("random:tiny-mistral", device="cpu").target
    part = model.first_layers(1)
    assert part.config.num_layers == 1 and part.config.sliding_window == 16 and part.head is model.head
    tokens = list(range(3, 40))
    assert plain_logits(model.first_layers(2), tokens).equal(plain_logits(model, tokens))
    assert not plain_logits(part, tokens).equal(plain_logits(model, tokens))
    part.ensure_positions(400)
    assert part._rope is model._rope
    for count in (0, 3):
        with pytest.raises(ValueError, match=r"^layers: expected an integer from 1 to 2"):
            model.first_layers(count)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("draft-model", r"^drafter: draft-model:MODEL takes a model .* draft-model:self,layers=N"),
        ("draft-model:self", r"^drafter: layers: expected an integer from 1 to 2, got 0"),
        ("draft-model:self,layers=3", r"^drafter: layers: expected an integer from 1 to 2, got 3"),
        ("draft-model:self,layers=1,dtype=int8", r"^drafter: dtype"),
        ("draft-model:random:tiny-mistral", r"^drafter: random:tiny-mistral has a vocabulary of 260 .* has 320"),
        ("draft-model:self,layers=1,tree=3y2", r"tree: expected the children"),
        ("draft-model:self,layers=1,tree=0x2", r"tree: expected the children"),
        ("draft-model:self,layers=1,tree=16x16", r"tree: 16x16 has 273 nodes with its root, at most 256"),
        ("draft-model:self,layers=1,confidence=1.5", r"confidence: expected a probability"),
        ("draft-model:self,layers=1,noise=1.5", r"noise: expected 0 or a number from 0.01 to 1"),
        ("draft-model:self,layers=1,noise=0.001", r"noise: expected 0 or"),
        ("draft-model:self,layers=1,length=0", r"length: expected an integer from 1"),
        (
            "draft-model:self,layers=1,depth=2",
            r"draft-model has no option 'depth'; its options: adaptive, confidence, dtype",
        ),
    ],
)
def test_what_cannot_draft_is_refused_by_name(spec, message):
    with pytest.raises(ValueError, match=message):
        load_drafter(spec, tiny_model().target)


def test_a_draft_model_that_is_not_there_is_not_taken_for_the_target():
    with pytest.raises(FileNotFoundError, match=r"^drafter: .*'/nowhere/at/all'"):
        load_drafter("draft-model:/nowhere/at/all", tiny_model().target)
    with pytest.raises(ValueError, match=r"^drafter: .*unknown preset"):
        load_drafter("draft-model:random:no-such-preset", tiny_model().target)


def words_of(*changed: int) -> Tokenizer:
    """A tokenizer of 330 words, with other words at the ids given."""
    words = {(f"other{i}" if i in changed else f"word{i}"): i for i in range(330)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="word0"))
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(Vocabulary(backend, "words", 330))


def test_a_draft_model_whose_tokens_mean_something_else_is_refused():
    drafter = drafter_of()
    drafter.small.tokenizer = words_of()
    drafter.check_tokenizer(None)
    drafter.check_tokenizer(words_of())
    drafter.check_tokenizer(words_of(tiny_model().config.vocab_size))  # neither model has that token
    with pytest.raises(ValueError, match=r"^drafter: token 7 is 'word7' in self and 'other7' in the target"):
        drafter.check_tokenizer(words_of(30, 7))
    with pytest.raises(ValueError, match=r"^drafter: token 8"):
        Engine(replace(tiny_model(), tokenizer=words_of(8)), drafter=drafter)


def test_the_tree_overrides_the_length():
    assert Config(length=3).widths == (1, 1, 1) and Config(length=3).nodes == 4
    assert Config(length=3, tree="4x2").widths == (4, 2) and Config(tree="4x2").nodes == 13
    assert Config(tree="1").nodes == 2


def test_distributions_are_not_looked_for_where_there_are_none():
    assert not load_drafter("none", tiny_model().target).gives_logits(Wants.PROBABILITIES)
    assert load_drafter("ouroboros:self,layers=1", tiny_model().target).room_for_logits(8) is None
    room = drafter_of(replacement=True).room_for_logits(8)
    assert isinstance(room, DraftLogits) and room.logits.shape == (8, 320) and room.replacement


def test_what_does_not_pay_is_left_out_where_no_samples_are_wanted():
    drafted = {}
    for costs, pays in ((CycleCosts({1: 1.0, 64: 1.0}), True), (CycleCosts({1: 1.0, 64: 64e9}), False)):
        target = tiny_model().target
        drafter = steady(DraftModel(Config(length=3, layers=2), "self", target, costs))
        outputs = tiny_engine(drafter).generate(PROMPTS, GREEDY)
        assert ids(outputs) == ids(tiny_engine("none").generate(PROMPTS, GREEDY))
        drafted[pays] = sum(output.stats.cycles for output in outputs)
    assert drafted[True] < 0.6 * drafted[False]
