import random
from types import SimpleNamespace

import pytest

from specengine._C import MAX_NODES
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.drafters.lookahead.drafter import Config, Lookahead
from specengine.ops import native
from tests.drafters import transcriptions
from tests.drafters.function_model import paths_of, pool_of, prefixes, run, sequence_of
from tests.drafters.repeating import PROMPTS, function
from tests.drafters.steady import steady
from tests.engines import GREEDY, SAMPLED, SHAPED, ids, tiny_engine

TARGET = SimpleNamespace(ops=native, config=SimpleNamespace(vocab_size=100))


def drafter_of(costs=None, **options):
    return steady(Lookahead(Config(**{"adaptive": costs is not None, "warm": True} | options), None, TARGET, costs))


@pytest.mark.parametrize("window, ngram, guesses", [(7, 5, 7), (4, 3, 2), (5, 2, 3), (1, 4, 1)])
@pytest.mark.parametrize("prompt", [False, True])
def test_it_is_the_algorithm(window, ngram, guesses, prompt):
    drafter = drafter_of(window=window, ngram=ngram, guesses=guesses, prompt=prompt)
    request = sequence_of([1, 5, 2, 8, 1, 5])
    steps = transcriptions.lookahead(function, [*request.tokens], window, ngram, guesses, prompt)
    more = 0
    for _ in range(200):
        ((tree, committed),) = run(drafter, function, [request])
        tried, expected, pool, levels = next(steps)
        assert paths_of(tree) == prefixes(tried)
        assert committed == expected
        assert pool_of(drafter.pool) == pool
        assert request.drafter_states[drafter].window.levels == levels
        more += len(committed) - 1
    assert more > 20  # it was of use, so acceptance was compared too


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SHAPED], ids=["greedy", "sampled", "shaped"])
@pytest.mark.parametrize("options", ["", ",adaptive=false", ",adaptive=false,warm=true,window=3,ngram=3,prompt=false"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_output_is_that_of_plain_decoding(params, options, batch):
    plain = ids(tiny_engine("none").generate(PROMPTS, params))
    engine = tiny_engine(f"lookahead{options}", max_batch_size=batch)
    for _ in range(2):
        outputs = engine.generate(PROMPTS, params)
        assert ids(outputs) == plain
    if options:
        assert sum(output.stats.cycles for output in outputs) < sum(map(len, plain))


def test_a_warm_pool_knows_what_was_said_before():
    cycles = []
    for warm in (False, True):
        drafter = drafter_of(warm=warm, prompt=False)
        for _ in range(2):
            request, count = sequence_of([1, 5, 2, 8, 1, 5]), 0
            while len(request.tokens) < 60:
                run(drafter, function, [request])
                count += 1
        cycles.append(count)
    assert cycles[1] < cycles[0]


def test_the_prompt_s_ngrams_are_drafted_where_asked_for():
    for prompt in (True, False):
        (tree,) = drafter_of(prompt=prompt, ngram=3).draft([sequence_of([20, 21, 22, 7, 20])]).trees
        assert ((21, 22) in paths_of(tree)) == prompt


@pytest.mark.parametrize("prompt", [True, False])
def test_the_answer_s_ngrams_are_drafted_where_those_of_the_prompt_are(prompt):
    drafter, request = drafter_of(prompt=prompt, ngram=3), sequence_of([40, 41])
    draft = drafter.draft([request])
    request.tokens += [20, 21, 22, 20]
    drafter.observe(draft, [[20, 21, 22, 20]], None)
    (tree,) = drafter.draft([request]).trees
    assert ((21, 22) in paths_of(tree)) == prompt
    assert pool_of(drafter.pool) == ({40: [(41, 20)], 41: [(20, 21)], 20: [(21, 22)], 21: [(22, 20)]} if prompt else {})


def test_no_tree_is_deeper_or_larger_than_allowed():
    rng = random.Random(3)
    drafter = drafter_of(window=10, ngram=6, guesses=20)
    request = sequence_of([1, 5, 2, 8, 1, 5])
    for _ in range(100):
        request.draft_limit = rng.choice([0, 1, 3, 64])
        ((tree, _),) = run(drafter, function, [request])
        assert max(map(len, paths_of(tree)), default=0) <= request.draft_limit
        assert len(tree.tokens) <= drafter.max_nodes <= MAX_NODES


def test_what_does_not_pay_is_left_out_for_most_cycles():
    cheap, dear = CycleCosts({1: 1.0, 64: 1.0}), CycleCosts({1: 1.0, 64: 64.0})
    drafted = []
    for costs in (cheap, dear):
        drafter, request = drafter_of(costs), sequence_of([1, 5, 2, 8, 1, 5])
        drafted.append(sum(len(run(drafter, function, [request])[0][0].tokens) > 1 for _ in range(300)))
    assert drafted[0] > 200 and 1 <= drafted[1] < 15


def test_no_choices_are_made_where_nothing_is_drafted(monkeypatch):
    for drafts in (False, True):
        engine, asked = tiny_engine("lookahead,adaptive=false"), []
        monkeypatch.setattr(
            engine.drafter.policy, "draft_whole", lambda requests, grow, drafts=drafts: Draft(requests, grow(drafts))
        )
        monkeypatch.setattr(engine.drafter, "observe_choices", lambda *_, asked=asked: asked.append(1))
        engine.generate(PROMPTS[0], GREEDY)
        assert bool(asked) == drafts


def test_a_pool_is_saved_where_it_is_of_all_requests(tmp_path):
    engine, path = tiny_engine("lookahead,adaptive=false,warm=true"), tmp_path / "pool"
    engine.generate(PROMPTS, GREEDY)
    engine.drafter.save_pool(path)
    again = tiny_engine(f"lookahead,warm=true,pool={path}")
    assert pool_of(again.drafter.pool) == pool_of(engine.drafter.pool) != {}
    with pytest.raises(ValueError, match="warm=false"):
        tiny_engine("lookahead").drafter.save_pool(path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 40, "ngram": 9}, "up to .* nodes, at most"),
        ({"ngram": 1}, "ngram"),
        ({"window": 0}, "window"),
        ({"guesses": 0}, "guesses"),
        ({"keys": 0}, "keys"),
        ({"pool": "file", "warm": False}, "pool: a file is for one pool"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)
