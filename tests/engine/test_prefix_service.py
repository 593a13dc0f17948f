"""Prefix hits in service: samples, threads, abandoned streams and interrupted cycles."""

import dataclasses
import gc
import threading
from contextlib import suppress
from unittest.mock import DEFAULT, Mock

import pytest

from specengine._C import PAGE_SIZE
from specengine.cache import kv_cache
from tests.engine.prefixes import FIRST, SYSTEM, caches, contents, copies, equal, said, whole
from tests.engines import GREEDY, SAMPLED, ids, tiny_engine

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing


@pytest.mark.parametrize("name", ["none", "eagle3", "glide", "draft-model"])
def test_samples_of_one_prompt_read_it_once(make, name):
    params = dataclasses.replace(SAMPLED, n=4)
    engine, cold = make(name), make(name, prefix_cache_mib=0)
    outputs = engine.generate(FIRST, params)
    assert ids(outputs) == ids(cold.generate(FIRST, params)) and len({*map(tuple, ids(outputs))}) > 1
    assert [output.stats.prefix_hit_tokens for output in outputs] == [0] + 3 * [whole(len(FIRST) - 1)]
    assert outputs[0].to_dict()["stats"]["prefix_hit_tokens"] == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["none", "eagle3", "draft-model"])
def test_abandoned_streams_leave_what_they_cached(make, name):
    engine, cold = make(name), make(name, prefix_cache_mib=0)
    answer = cold.generate(FIRST, GREEDY).token_ids
    stream = engine.stream(FIRST, GREEDY)
    while len(next(stream).token_ids) and len(engine.cache._known.pages) < 1:
        pass
    text = [*FIRST, *answer]
    thread = threading.Thread(target=stream.close)
    thread.start(), thread.join()
    del stream
    gc.collect()
    assert engine.cache.pages_in_use == 0
    expected = said(cold, [[*text, 4]], GREEDY)
    assert said(engine, [[*text, 4]], GREEDY) == expected
    assert engine.cache.prefixes.hit == whole(len(FIRST))


class Interrupted(Exception):
    """What happens in the middle of a cycle."""


CUTS = {
    "none": lambda e: (e.core.target, "hidden_states"),
    "prompt_lookup": lambda e: (e.cache, "compact"),
    "eagle3": lambda e: (e.drafter.network, "forward"),
    "glide": lambda e: (e.drafter.network, "states"),
    "draft-model": lambda e: (e.drafter.model, "hidden"),
    "ouroboros": lambda e: (e.drafter._sentences, "_compact"),
}


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("calls", [0, 1])
def test_what_an_interrupted_cycle_leaves_is_not_found(make, name, calls, monkeypatch):
    """Tokens may be committed whose keys are still among those of the tree, or pairs taken that were not read."""
    cold, prompt = make(name), [8, 9] * 20
    loop = dataclasses.replace(GREEDY, max_new_tokens=60, logit_bias=dict.fromkeys((8, 9), 50.0))
    text = [*prompt, *cold.generate(prompt, loop).token_ids][: PAGE_SIZE + 1]
    cold.generate([*text, 9, 9, 9], loop)
    for tokens in range(PAGE_SIZE - len(prompt) - 3, PAGE_SIZE - len(prompt) + 4):
        engine = make(name)
        stream, said = engine.stream(prompt, loop), 0
        while said < tokens:
            said += len(next(stream).token_ids)
        part, method = CUTS[name](engine)
        act = Mock(side_effect=[DEFAULT] * calls + [Interrupted], wraps=getattr(part, method))
        with monkeypatch.context() as patch, suppress(Interrupted):
            patch.setattr(part, method, act)
            next(stream)
        stream.close()
        for cache, expected in zip(caches(engine), contents(cold, text), strict=True):
            assert cache.pages_in_use == 0
            pages = cache._known.find(engine.core.sharing, text)
            assert equal(copies(cache, pages), [each[:, : len(pages)] for each in expected])


@pytest.mark.full
def test_two_threads_share_what_they_say(make):
    engine, cold = make("eagle3", max_batch_size=2), make("eagle3", prefix_cache_mib=0)
    prompts = [[*SYSTEM[: 80 + 30 * i], 5, i] for i in range(4)]
    expected, found = ids(cold.generate(prompts, GREEDY)), {}

    def work(part):
        for turn in range(3):
            for i in range(4):
                i = (i + 2 * part) % 4
                found[part, turn, i] = engine.generate(prompts[i], GREEDY).token_ids

    threads = [threading.Thread(target=work, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24 and all(tokens == expected[i] for (_, _, i), tokens in found.items())
    assert engine.cache.pages_in_use == 0 and engine.cache.prefixes.hit > 0


def test_a_cache_that_is_let_go_keeps_what_it_knows(monkeypatch):
    monkeypatch.setattr(kv_cache, "IDLE_BYTES", 1 << 20)
    engine, cold = tiny_engine("none", prefix_cache_mib=1), tiny_engine("none", prefix_cache_mib=0)
    engine.generate([[3 + i] * 300 for i in range(32)], GREEDY)
    assert engine.cache.pages_with_memory * engine.cache.page_bytes <= 2 << 20
    assert ids([engine.generate(FIRST, SAMPLED)]) == ids([cold.generate(FIRST, SAMPLED)])
    output = engine.generate([34] * 299 + [5], SAMPLED)
    assert output.token_ids == cold.generate([34] * 299 + [5], SAMPLED).token_ids
    assert output.stats.prefix_hit_tokens == whole(299)
    assert engine.cache.prefixes.evicted > 0


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "64"])
def test_the_bound_is_checked_by_name(value):
    with pytest.raises(ValueError, match=r"^prefix_cache_mib: expected an integer from 0 to"):
        tiny_engine(prefix_cache_mib=value)
