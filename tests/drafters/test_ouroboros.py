import random
from types import SimpleNamespace

import pytest

from specengine._C import MAX_NODES
from specengine.draft_policy.cost_model import CycleCosts
from specengine.drafters import load_drafter
from specengine.drafters.draft_model import small_model
from specengine.drafters.ouroboros.config import TASKS, Config
from specengine.drafters.ouroboros.drafter import Ouroboros
from specengine.engine.request import Request
from specengine.ops import native
from specengine.rules.base import Wants
from tests.drafters import transcriptions
from tests.drafters.function_model import FunctionModel, paths_of, pool_of, prefixes, run, sequence_of
from tests.drafters.repeating import PROMPTS, function
from tests.drafters.steady import steady
from tests.engines import GREEDY, SAMPLED, SHAPED, ids, tiny_engine, tiny_model

TARGET = SimpleNamespace(ops=native, config=SimpleNamespace(vocab_size=100))
START = [1, 5, 2, 8, 1, 5]


def small(text):
    """Errs now and then."""
    return (function(text) + (text[-1] * len(text) % 11 == 3)) % 13


@pytest.fixture
def drafter_of(monkeypatch):
    def make(draft=small, costs=None, max_position=10_000, **options):
        model = FunctionModel(draft, TARGET.config.vocab_size, max_position)
        monkeypatch.setattr(small_model, "_open", lambda *_: (model, None))
        return steady(Ouroboros(Config(**{"adaptive": costs is not None} | options), "small", TARGET, costs))

    return make


@pytest.mark.quick(1)
@pytest.mark.parametrize("length, window, ngram, suffixes", [(4, 5, 4, 3), (6, 3, 3, 1), (3, 4, 5, 4), (5, 6, 4, 0)])
@pytest.mark.parametrize("inspire, refine", [(True, "always"), (True, "confirmed"), (False, "never")])
def test_it_is_the_algorithm(drafter_of, length, window, ngram, suffixes, inspire, refine):
    options = {"length": length, "window": window, "ngram": ngram, "suffixes": suffixes}
    drafter = drafter_of(**options, inspire=inspire, refine=refine)
    request = sequence_of(START)
    steps = transcriptions.ouroboros(
        function, small, [*request.tokens], length, window, ngram, suffixes, inspire, refine
    )
    beyond = 0
    for _ in range(200):
        ((tree, committed),) = run(drafter, function, [request])
        sentence, ends, expected, pool, levels = next(steps)
        assert tree.tokens[1 : length + 1] == sentence
        assert paths_of(tree) == prefixes([sentence, *(sentence + list(phrase) for phrase in ends)])
        assert committed == expected
        assert pool_of(drafter.pool) == pool
        assert request.drafter_states[drafter.small].window.levels == levels
        beyond += len(committed) > length + 1
    assert (beyond > 5) == (suffixes > 0)  # suffixes were accepted, so that was compared too


def drafted(drafter, request, sentence, phrases=()):
    """The draft where the small model says a sentence and the pool has these phrases after it."""
    for phrase in phrases:
        drafter.pool.insert(sentence[-1], phrase)
    drafter._sentences.draft = lambda cache, requests, states, goals, noise: states[0].sentence.extend(sentence)
    return drafter.draft([request])


def test_the_newest_phrases_are_the_suffixes(drafter_of):
    draft = drafted(
        drafter_of(length=2, ngram=3, suffixes=2), sequence_of([9]), [20, 21], [[30, 31], [40, 41], [40, 42]]
    )
    assert paths_of(draft.trees[0]) == prefixes([[20, 21, 40, 41], [20, 21, 40, 42]])


def test_inspiration_reads_what_the_target_says_behind_refused_tokens(drafter_of):
    drafter, request = drafter_of(length=5, ngram=3, suffixes=0), sequence_of([9])
    draft = drafted(drafter, request, [20, 21, 22, 23, 24])
    # refused from 21 on; behind it the target says 22 23, behind 22 it says 23 7, behind 23 something else
    drafter.observe_choices(draft, [[20, 50]], [[20, 50, 22, 23, 7, 8]])
    assert pool_of(drafter.pool) == {21: [(22, 23)], 22: [(23, 7)]}


def test_inspiration_needs_a_refused_token(drafter_of):
    drafter, request = drafter_of(length=3, ngram=3, suffixes=0), sequence_of([9])
    draft = drafted(drafter, request, [20, 21, 22])
    drafter.observe_choices(draft, [[20, 21, 22, 23]], [[20, 21, 22, 23]])
    assert len(drafter.pool) == 0


@pytest.mark.parametrize("refine, whole, refined", [
    ("always", True, True), ("always", False, True), ("confirmed", True, True), ("confirmed", False, False),
    ("never", True, False), ("never", False, False),
])  # fmt: skip
def test_refinement_takes_the_target_s_word_for_a_suffix(drafter_of, refine, whole, refined):
    drafter, request = drafter_of(length=2, ngram=3, suffixes=2, refine=refine, inspire=False), sequence_of([9])
    draft = drafted(drafter, request, [20, 21], [[30, 31], [40, 41]])
    (tree,) = draft.trees
    said = dict(zip([(), *sorted(paths_of(tree), key=len)], range(60, 80), strict=False))
    said |= {(): 20, (20,): 21 if whole else 50}
    paths = {0: ()}
    for node in range(1, len(tree.tokens)):
        paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
    behind = said[20, 21]
    committed = [20, 21, behind] if whole else [20, 50]
    drafter.observe_choices(draft, [committed], [[said[paths[node]] for node in range(len(tree.tokens))]])
    along = [(behind, said[20, 21, 30]), (behind, said[20, 21, 40])]
    assert pool_of(drafter.pool) == {21: along if refined else [(30, 31), (40, 41)]}


def test_a_warm_pool_helps_the_next_request(drafter_of):
    cycles = {}
    for warm in (False, True):
        drafter = drafter_of(length=4, window=5, ngram=4, warm=warm)
        for number in range(2):
            request, count = sequence_of(START), 0
            while len(request.tokens) < 100:
                run(drafter, function, [request])
                count += 1
            cycles[warm, number] = count
    assert cycles[False, 0] == cycles[False, 1] == cycles[True, 0] > cycles[True, 1]


@pytest.mark.full
def test_requests_of_a_batch_do_not_disturb_each_other(drafter_of):
    drafter = drafter_of(length=5, window=4, ngram=4, warm=False)
    starts = [START, [3], [2, 2, 2, 9], START[::-1]]
    alone = []
    for start in starts:
        request = sequence_of(start)
        alone.append([run(drafter, function, [request]) for _ in range(40)])
    together = [sequence_of(start) for start in starts]
    for cycle in range(40):
        assert run(drafter, function, together) == [own[cycle][0] for own in alone]


def test_the_small_model_s_context_may_end(drafter_of):
    drafter = drafter_of(length=5, window=4, ngram=4, max_position=40)
    request, nodes = sequence_of(START, limit=200), []
    while len(request.tokens) < 60:
        ((tree, _),) = run(drafter, function, [request])
        nodes.append(len(tree.tokens))
    assert nodes[0] > 5 and nodes[-1] == 1


def test_no_tree_is_deeper_or_larger_than_allowed(drafter_of):
    rng, drafter, request = random.Random(3), drafter_of(length=6, window=4, ngram=4), sequence_of(START)
    for _ in range(100):
        request.draft_limit = rng.choice([0, 1, 3, 7, 64])
        ((tree, _),) = run(drafter, function, [request])
        assert max(map(len, paths_of(tree)), default=0) <= request.draft_limit
        assert len(tree.tokens) <= drafter.max_nodes <= MAX_NODES


@pytest.mark.full
def test_what_does_not_pay_is_left_out_for_most_cycles(drafter_of):
    counts = []
    for seconds in (1.0, 64.0):
        drafter = drafter_of(costs=CycleCosts({1: 1.0, 64: seconds}), length=5, window=4, ngram=4)
        request = sequence_of(START)
        counts.append(sum(len(run(drafter, function, [request])[0][0].tokens) > 1 for _ in range(300)))
    assert counts[0] > 200 and 1 <= counts[1] < 15


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SHAPED], ids=["greedy", "sampled", "shaped"])
@pytest.mark.parametrize("options", ["", ",adaptive=false", ",adaptive=false,warm=false,window=3,ngram=3,length=6"])
@pytest.mark.parametrize("batch", [1, 4])
def test_the_output_is_that_of_plain_decoding(params, options, batch):
    plain = ids(tiny_engine("none").generate(PROMPTS, params))
    engine = tiny_engine(f"ouroboros:self,layers=1{options}", max_batch_size=batch)
    for _ in range(2):
        assert ids(engine.generate(PROMPTS, params)) == plain
    assert engine.drafter.small.cache.pages_in_use == 0


def test_drafts_are_drawn_as_match_draws_above_temperature_0():
    """A small model that is the target is always right, whatever the temperature."""
    model, prompts = tiny_model(), [*PROMPTS, [1, 2] * 200]  # a prompt of more rows than a tree has
    drafter = load_drafter("ouroboros:random:tiny-llama,adaptive=false,noise=1,window=2,ngram=3,length=4", model.target)
    engine = tiny_engine(drafter, max_batch_size=4)
    mixed = [GREEDY, SAMPLED, SHAPED, GREEDY, SHAPED, SAMPLED]
    for params in ([GREEDY] * 6, [SAMPLED] * 6, mixed):
        outputs = engine.generate(prompts, params)
        assert ids(outputs) == ids(tiny_engine("none").generate(prompts, params))
        for output, own in zip(outputs, params, strict=True):
            assert own is SHAPED or output.stats.tau > 4  # all but the last cycle


def test_rules_that_draw_from_a_residual_get_drafts_that_share_none_of_its_noise():
    """It would bias what they emit; `match` emits the same whatever is drafted."""
    drafter = load_drafter("ouroboros:self,layers=1,adaptive=false,warm=false,window=2,ngram=3", tiny_model().target)

    def drafted(wants, seed):
        request = Request([5, 9, 13], SAMPLED, seed, 48, frozenset(), None)
        (tree,) = drafter.draft_for(wants, [request]).trees
        drafter.release(request)
        return tuple(tree.tokens)

    assert len({drafted(Wants.NOTHING, seed) for seed in range(10)}) > 5
    assert len({drafted(Wants.SAMPLES, seed) for seed in range(10)}) == 1


@pytest.mark.parametrize("task", TASKS)
def test_the_paper_s_settings_are_possible(task):
    assert Config(task=task).sizes == TASKS[task]
    assert Config(task=task, length=3, window=2).sizes == (3, 2, TASKS[task][2])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"task": "poetry"}, "task: expected one of yi-humaneval"),
        ({"refine": "maybe"}, "refine: expected one of"),
        ({"ngram": 1}, "ngram"),
        ({"length": 200, "suffixes": 20}, "length: .* nodes"),
        ({"window": 100}, "window: 100 columns"),
        ({"suffixes": -1}, "suffixes"),
        ({"noise": 2.0}, "noise: expected 0 or"),
        ({"pool": "file", "warm": False}, "pool: a file is for one pool"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)
