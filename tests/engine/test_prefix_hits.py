"""What a prompt finds in the cache of earlier texts is what its own prefill would have written, and changes nothing."""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine import Engine, SamplingParams
from specengine._C import PAGE_SIZE
from specengine.drafters.hidden_states.pair_reader import PairReader
from specengine.ops import native
from specengine.tensor_parallel.loading import load_model
from tests.engine.prefixes import FIRST, SECOND, SPECS, SYSTEM, caches, contents, copies, equal, said, whole
from tests.engines import GREEDY, SAMPLED, tiny_engine, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
SMALL = ("draft-model", "draft-model tree", "ouroboros")
BESIDE = (
    "dflash",
    "domino chain",
    "dspark",
    "jetspec chain",
    "eagle",
    "eagle3",
    "eagle3 backbone",
    "mtp",
    "p-eagle",
    "pard",
    "pard2",
    "fasteagle",
    "glide",
    "combine",
)


@pytest.mark.quick(5)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", SPECS)
def test_a_hit_changes_no_token_no_bit_and_no_draft(make, name, params):
    cold, warm = make(name, prefix_cache_mib=0), make(name)
    for prompt in (FIRST, SECOND):  # drafters may learn from the one for the other
        assert said(warm, [prompt], params) == said(cold, [prompt], params)
    assert warm.cache.prefixes.hit == whole(len(SYSTEM)) and cold.cache.prefixes.looked_up == 0
    if name in SMALL:
        assert warm.drafter.small.cache.prefixes.hit == whole(len(SYSTEM))


@pytest.mark.parametrize("part", ["glide:{glide}", "pard:{pard}"])
def test_a_combination_finds_what_its_parts_read_of_a_prompt(folders, part):
    engine = tiny_engine("combine:prompt_lookup+" + part.format(**folders))
    outputs = [engine.generate(prompt, dataclasses.replace(GREEDY, max_new_tokens=1)) for prompt in (FIRST, SECOND)]
    assert outputs[1].stats.prefix_hit_tokens == whole(len(SYSTEM))


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", SPECS)
def test_the_next_turn_finds_the_answer_of_the_last_one(make, name):
    """A conversation: every prompt has the prompt and the answer before it."""
    cold, warm = make(name, prefix_cache_mib=0), make(name)
    prompt = SYSTEM[:50]
    for turn in range(3):
        outputs = [engine.generate(prompt, GREEDY) for engine in (cold, warm)]
        assert outputs[0].token_ids == outputs[1].token_ids
        assert outputs[0].stats.tau == outputs[1].stats.tau
        earlier = len(prompt) - 3 if turn else 0
        # of the last token of an answer, and of a drafter's pair with the one behind it, nothing is cached
        assert outputs[1].stats.prefix_hit_tokens in {whole(max(1, earlier - lag)) for lag in (0, 1, 2)}
        prompt = [*prompt, *outputs[0].token_ids, 7, 8 + turn, 9]
    assert outputs[1].stats.prefix_hit_tokens >= 2 * PAGE_SIZE > 50


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", SPECS)
def test_what_cycles_leave_in_the_cache_has_the_bits_of_a_prefill(make, name):
    generating, reading = make(name), make(name)
    params = dataclasses.replace(GREEDY, max_new_tokens=130)
    text = [*FIRST, *generating.generate(FIRST, params).token_ids]
    reading.generate([*text, 3], dataclasses.replace(GREEDY, max_new_tokens=4))
    text = text[: whole(len(text) - 2) + 1]
    assert len(text) > len(FIRST) + PAGE_SIZE
    for written, read in zip(contents(generating, text), contents(reading, text), strict=True):
        assert equal(written, read) and written[0].shape[1] == len(text) // PAGE_SIZE
    assert len(generating.cache._pools) == 1 + (name in BESIDE) + (name in ("combine", "pard2"))


@pytest.mark.parametrize("name", ("none", *BESIDE, *SMALL))
@pytest.mark.parametrize("length", range(PAGE_SIZE - 4, PAGE_SIZE + 3))
def test_pages_are_complete_when_they_are_shared(make, name, length):
    """The last slots of a page are the last to be filled, by a drafter after the target."""
    engine, reading, shared = make(name), make(name), []
    for number, cache in enumerate(caches(engine)):

        def watch(pages, text=(), sharing=None, filled=True, *, number=number, cache=cache, act=None):
            shared.append((number, text, copies(cache, pages[: (len(text) - 1) // PAGE_SIZE])))
            act(pages, text, sharing, filled)

        cache.share, cache.free = partial(watch, act=cache.share), partial(watch, act=cache.free)
    prompt = SYSTEM[:length]
    answer = engine.generate(prompt, dataclasses.replace(GREEDY, max_new_tokens=5)).token_ids
    reading.generate([*prompt, *answer, 7, 7, 7], GREEDY)
    assert {number for number, _, _ in shared} == {*range(len(caches(engine)))}
    for number, text, seen in shared:
        if len(text) > PAGE_SIZE:
            assert equal(seen, contents(reading, text)[number])


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", BESIDE + SMALL)
def test_texts_may_part_behind_a_whole_page(make, name):
    """What a drafter has in a page's last slot depends on the token behind it."""
    cold, warm = make(name, prefix_cache_mib=0), make(name)
    page = SYSTEM[: 2 * PAGE_SIZE]
    for prompt in ([*page, 5, 6], [*page, 7, *SYSTEM[:80]], [*page, 7, *SYSTEM[:80], 9]):
        assert said(warm, [prompt], GREEDY) == said(cold, [prompt], GREEDY)
    assert warm.cache.prefixes.hit == (1 + 3) * PAGE_SIZE


@pytest.mark.parametrize("name", BESIDE + SMALL)
def test_drafts_depend_on_what_is_found(make, name):
    """Else the tests above could not fail: with other keys beside the target's the drafts are others."""
    engine = make(name)
    said(engine, [FIRST], GREEDY)
    pools = [engine.drafter.small.cache] if name in SMALL else engine.cache._pools[1:]
    for pool in pools:
        pool.k[:, :20].normal_(generator=torch.Generator().manual_seed(1))
    spoilt = said(engine, [SECOND], GREEDY)
    expected = said(make(name, prefix_cache_mib=0), [SECOND], GREEDY)
    assert engine.cache.prefixes.hit == whole(len(SYSTEM))
    assert [each[:2] for each in spoilt] == [each[:2] for each in expected] and spoilt != expected


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", SPECS)
def test_shared_pages_are_never_written(make, name):
    engine = make(name, max_batch_size=3)
    engine.generate(FIRST, GREEDY)
    text = FIRST[: whole(len(SYSTEM)) + 1]
    before = contents(engine, text)
    outputs = engine.generate([SECOND, [*SYSTEM, 8], FIRST], GREEDY)
    assert all(output.stats.prefix_hit_tokens == whole(len(SYSTEM)) for output in outputs)
    for ours, theirs in zip(before, contents(engine, text), strict=True):
        assert equal(ours, theirs) and ours[0].numel()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 330), st.integers(3, 6)), min_size=2, max_size=6))
def test_prompts_that_begin_alike_somewhere_say_what_they_say_alone(asked):
    """Of texts that part at any place, in any order, with every length of passes."""
    model = dataclasses.replace(tiny_model(), eos_token_ids=frozenset())
    params = SamplingParams(max_new_tokens=3, logprobs=1)
    warm, cold = (Engine(model, drafter="none", prefix_cache_mib=mib) for mib in (1, 0))
    for variant, length, last in asked:
        prompt = [*SYSTEM, *SYSTEM][:length]
        prompt[70 * variant % length] += variant
        prompt.append(last)
        assert warm.generate(prompt, params).logprobs == cold.generate(prompt, params).logprobs


def test_passes_that_begin_elsewhere_change_no_bit():
    model = load_model("random:tiny-llama", device="cpu", ops=dataclasses.replace(native, prefill_rows=100))
    warm, cold = (Engine(model, drafter="none", prefix_cache_mib=mib) for mib in (9, 0))
    params = dataclasses.replace(GREEDY, logprobs=1)
    long = [*SYSTEM, *SYSTEM[:150]]
    warm.generate(SYSTEM, params)
    assert warm.generate(long, params).logprobs == cold.generate(long, params).logprobs
    assert warm.cache.prefixes.hit == whole(len(SYSTEM))


def test_arithmetic_that_is_not_strict_shares_whole_passes_of_prompts_alone():
    ops = dataclasses.replace(native, strict=False, prefill_rows=2 * PAGE_SIZE)
    engine = Engine(load_model("random:tiny-llama", device="cpu", ops=ops), drafter="none")
    answer = engine.generate(SYSTEM, dataclasses.replace(GREEDY, max_new_tokens=100)).token_ids
    stats = engine.generate([*SYSTEM, *answer, 5], GREEDY).stats
    assert stats.prefix_hit_tokens == 2 * PAGE_SIZE  # of 199 tokens; with the answer's 298 would be known
    assert engine.generate([*SYSTEM, *answer, 5], GREEDY).stats.prefix_hit_tokens == 4 * PAGE_SIZE


def test_a_pair_drafter_begins_behind_the_hit(make):
    engine = make("eagle3")
    engine.generate(FIRST, GREEDY)
    assert isinstance(engine.drafter.reader, PairReader)
    starts, observe = [], engine.drafter.observe_prompt
    engine.drafter.observe_prompt = lambda request, start, hidden_states: (
        starts.append((start, len(hidden_states.last))),
        observe(request, start, hidden_states),
    )
    engine.generate(SECOND, GREEDY)
    assert starts == [(whole(len(SYSTEM)), len(SECOND) - 1 - whole(len(SYSTEM)))]
