"""Requests that a drafter with keys and values of its own does not read: plain output, shared pages, and no drafts."""

import pytest
import torch

from specengine._C import PAGE_SIZE
from tests.drafters.requests import sequence_of
from tests.drafters.steady import policy_in
from tests.engine.prefixes import FIRST, SECOND, SPECS, SYSTEM, contents, equal, said, whole
from tests.engines import GREEDY, SAMPLED, ids, tiny_engine

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
ALONE = ("eagle", "eagle3", "eagle3 backbone", "fasteagle", "p-eagle")
JOINED = "combine:prompt_lookup+eagle3:{eagle3};levels=3,adaptive=false"
THIRD = [*SYSTEM[:150], 3, 4, 3, 4]


@pytest.fixture
def joined(folders):
    return lambda **options: tiny_engine(JOINED.format(**folders), **options)


def answer(monkeypatch, engine, *answers):
    """Lets the policy answer for each request in turn, the last answer for all that follow; returns the questions."""
    asked = []

    def reads(number, tokens, limit, batch):
        assert limit == GREEDY.max_new_tokens == SAMPLED.max_new_tokens
        asked.append((number, batch))
        return answers[min(len(asked), len(answers)) - 1]

    monkeypatch.setattr(policy_in(engine.drafter), "reads", reads)
    return asked


def filled(engine):
    assert engine.cache.prefixes.cached  # takes in what was given back
    return sum(node.filled for node in engine.cache._known._nodes.values())


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ALONE)
def test_an_unread_request_is_decoded_plainly_and_shares_its_pages(make, monkeypatch, name, params):
    engine, plain = make(name), make("none")
    asked = answer(monkeypatch, engine, False)
    monkeypatch.setattr(engine.drafter.reader.network, "pick", lambda *_: 1 / 0)
    for prompt in (FIRST, SECOND):
        assert said(engine, [prompt], params) == said(plain, [prompt], params)
    assert engine.cache.prefixes == plain.cache.prefixes and engine.cache.prefixes.hit == whole(len(SYSTEM))
    assert filled(engine) == 0 and asked == [(0, 1), (0, 1)]


@pytest.mark.parametrize("mib", [0, 9])
@pytest.mark.parametrize("name", ALONE)
def test_the_others_of_a_batch_have_the_trees_that_they_have_alone(make, monkeypatch, name, mib):
    engine, alone = make(name, max_batch_size=4, prefix_cache_mib=mib), make(name, prefix_cache_mib=0)
    prompts = [FIRST, SECOND, THIRD, SYSTEM]
    asked = answer(monkeypatch, engine, True, False, True, False)
    found = said(engine, prompts, GREEDY)
    engines = [alone, make("none")] * 2
    assert found == [said(each, [prompt], GREEDY)[0] for each, prompt in zip(engines, prompts, strict=True)]
    assert asked == [(0, 4)] * 4
    assert any(len(cycle.tokens) > 1 for cycle in found[0][2]) and all(len(c.tokens) == 1 for c in found[1][2])


@pytest.mark.parametrize("name", ALONE)
def test_who_is_read_later_fills_the_pages(make, monkeypatch, name):
    engine, fresh = make(name), make(name)
    answer(monkeypatch, engine, False, True)
    engine.generate(FIRST, GREEDY)
    expected = said(fresh, [FIRST], GREEDY)
    assert said(engine, [FIRST], GREEDY) == expected
    assert engine.cache.prefixes.hit == 0 and filled(engine) == len(fresh.cache._known.pages)
    for ours, theirs in zip(contents(engine, FIRST), contents(fresh, FIRST), strict=True):
        assert equal(ours, theirs) and ours[0].shape[1] == len(FIRST) // PAGE_SIZE
    assert said(engine, [FIRST], GREEDY) == expected
    assert engine.cache.prefixes.hit == whole(len(FIRST) - 1)
    assert engine.cache.pages_in_use == 0


@pytest.mark.parametrize("name", ALONE)
def test_pages_are_filled_while_unread_requests_hold_them(make, monkeypatch, name):
    engine, fresh = make(name, max_batch_size=5), make(name)
    answer(monkeypatch, engine, False, False, True, True, False)
    ((tokens, *rest),) = said(fresh, [FIRST], GREEDY)
    found = said(engine, [FIRST] * 5, GREEDY)
    assert found[2:4] == [(tokens, *rest)] * 2 and {tuple(each[0]) for each in found} == {tuple(tokens)}
    hit = whole(len(FIRST) - 1)
    assert engine.cache.prefixes.hit == 3 * hit  # the second, the fourth and the fifth
    for ours, theirs in zip(contents(engine, FIRST), contents(fresh, FIRST), strict=True):
        assert equal(ours, theirs) and ours[0].numel()


def test_what_readers_find_was_filled(make, monkeypatch):
    """Else the tests above could not fail: with other keys beside the target's the drafts are others."""
    engine = make("eagle3")
    answer(monkeypatch, engine, False, True)
    engine.generate(FIRST, GREEDY)
    find = engine.cache._known.find
    monkeypatch.setattr(engine.cache._known, "find", lambda sharing, text, filled: find(sharing, text, False))
    for keys_or_values in (engine.cache._pools[1].k, engine.cache._pools[1].v):  # nothing was written to either
        keys_or_values[:, : engine.cache.pages_with_memory].normal_(generator=torch.Generator().manual_seed(1))
    spoilt, expected = said(engine, [FIRST], GREEDY), said(make("eagle3"), [FIRST], GREEDY)
    assert spoilt[0][:2] == expected[0][:2] and spoilt != expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_combination_asks_for_its_part(joined, monkeypatch, params):
    engine, plain = joined(max_batch_size=3), tiny_engine("none")
    asked = answer(monkeypatch, engine, False, True, False)
    outputs = engine.generate([FIRST, FIRST, SECOND], params)
    assert ids(outputs) == ids(plain.generate([FIRST, FIRST, SECOND], params))
    drafted = [output.stats.sources["eagle3"].drafted if output.stats.sources else 0 for output in outputs]
    assert drafted[0] == drafted[2] == 0 < drafted[1]
    assert asked == [(1, 3)] * 3
    assert [output.stats.prefix_hit_tokens for output in outputs] == [0, 0, whole(len(SYSTEM))]
    fresh = joined()
    fresh.generate(FIRST, params)
    for ours, theirs in zip(contents(engine, FIRST), contents(fresh, FIRST), strict=True):
        assert equal(ours, theirs) and ours[0].numel()


def test_glide_reads_where_its_policy_says_so(make, monkeypatch):
    engine, plain = make("glide", max_batch_size=2), make("none")
    asked = answer(monkeypatch, engine, False, True)
    for prompts in ([FIRST], [SECOND, THIRD]):
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == [
            plain.generate(prompt, GREEDY).token_ids for prompt in prompts
        ]
        assert (filled(engine) > 0) == (len(prompts) == 2)
    assert asked == [(0, 1), (0, 2), (0, 2)]


def test_a_combination_reads_with_all_parts_or_with_none(make, monkeypatch):
    engine = make("combine")  # with eagle3 and glide
    asked = answer(monkeypatch, engine, False, False, False, True)
    for prompt, filled_pages in ((FIRST, 0), (FIRST, whole(len(FIRST)) // PAGE_SIZE)):
        engine.generate(prompt, GREEDY)
        assert filled(engine) == filled_pages
    assert asked == [(1, 1), (2, 1)] * 2


@pytest.mark.parametrize("joins", [False, True])
def test_what_reading_takes_is_charged(make, joined, monkeypatch, joins):
    engine, charges = joined() if joins else make("eagle3"), []
    answer(monkeypatch, engine, False, True)
    monkeypatch.setattr(policy_in(engine.drafter), "charge", lambda *charge: charges.append(charge))
    engine.generate(FIRST, GREEDY)
    assert charges == []
    engine.generate(SECOND, GREEDY)
    ((number, tokens, seconds),) = charges
    assert number == joins and tokens == len(SECOND) - 1 and 0 < seconds < 60


def test_a_drafter_is_ready_for_what_it_reads(make):
    requests = [sequence_of([1, 2, 3]) for _ in range(3)]
    requests[1].drafter_reads = False
    assert make("eagle3").drafter.ready(requests) == make("fasteagle").drafter.ready(requests) == 2
    assert make("glide").drafter.ready(requests) == 2 and make("medusa").drafter.ready(requests) == 3


def test_drafters_without_a_cache_of_their_own_find_every_page(make):
    for name in sorted(SPECS.keys() - {*ALONE, "glide", "combine"}):
        engine = make(name)
        engine.generate(FIRST, GREEDY)
        assert engine.generate(SECOND, GREEDY).stats.prefix_hit_tokens == whole(len(SYSTEM)), name
        assert filled(engine) == len(engine.cache._known.pages)
