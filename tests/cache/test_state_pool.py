"""Slots of recurrent states: who owns them, how they grow, and what the prefix cache keeps of them."""

import pytest
import torch

from specengine._C import PAGE_SIZE
from specengine.cache import kv_cache
from specengine.cache.kv_cache import KVCache
from specengine.cache.prefix_cache import Sharing
from specengine.cache.state_memory import StateMemory
from specengine.cache.state_pool import StatePool
from specengine.utils.gated_delta_config import GatedDeltaConfig
from tests.cache.small_caches import EVERYBODY, begin, text_of

CONFIG = GatedDeltaConfig(frozenset({0, 2}), 1, 2, 3, 4)


def hybrid_cache(kept=2):
    states = StatePool(StateMemory(CONFIG, torch.device("cpu")))
    cache = KVCache(1, 1, 1, torch.float32, torch.device("cpu"), states=states)
    cache.kept_bytes, states.most_kept = 100 * cache.page_bytes, kept
    return cache


def state_of(cache, pages):
    batch = cache.batch([pages], [0])
    return cache.states.of_pass(batch.states, 1, False).states[batch.states.slots[0]]


def prefilled(cache, text, value):
    """A request whose state behind its full pages has one value everywhere."""
    pages, hit = begin(cache, text)
    state_of(cache, pages).fill_(value)
    cache.share(pages, text, EVERYBODY)
    cache.keep_state(pages, len(text) // PAGE_SIZE * PAGE_SIZE, EVERYBODY)
    return pages, hit


def test_a_new_request_begins_with_zeros_and_a_freed_slot_is_used_again():
    cache = hybrid_cache()
    pages = cache.allocate(10)
    state_of(cache, pages).fill_(3)
    cache.free(pages)
    again = cache.allocate(10)
    assert not state_of(cache, again).any()
    assert cache.states.in_use == 1


def test_slots_grow_and_keep_what_they_hold():
    cache = hybrid_cache()
    owners = [cache.allocate(10) for _ in range(9)]
    for value, pages in enumerate(owners):
        state_of(cache, pages).fill_(value)
    owners += [cache.allocate(10) for _ in range(9)]
    assert [state_of(cache, pages).unique().tolist() for pages in owners[:9]] == [[float(v)] for v in range(9)]
    slots = cache.batch(owners, [0] * 18).states.slots.tolist()
    assert len(set(slots)) == 18


def test_states_without_room_leave_pages_and_slots_as_they_were():
    states = StatePool(StateMemory(CONFIG, torch.device("cpu"), 2))
    cache = KVCache(1, 1, 1, torch.float32, torch.device("cpu"), states=states)
    owners = [cache.allocate(10) for _ in range(2)]
    state_of(cache, owners[1]).fill_(5)
    assert not cache.has_room(10)
    with pytest.raises(MemoryError, match="recurrent states: all 2 slots are in use"):
        cache.allocate(10)
    assert (states.in_use, cache.pages_in_use) == (2, 2)
    assert state_of(cache, owners[1]).unique().tolist() == [5.0]
    cache.free(owners[0])
    cache.allocate(10)
    assert states.in_use == 2


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
def test_copies_leave_half_of_the_slots_to_requests(slots):
    states = StatePool(StateMemory(CONFIG, torch.device("cpu"), slots))
    cache = KVCache(1, 1, 1, torch.float32, torch.device("cpu"), states=states)
    cache.kept_bytes, states.most_kept = 100 * cache.page_bytes, 100
    for symbol in range(1, 6):
        pages, _ = prefilled(cache, text_of(symbol, tail=8), float(symbol))
        cache.free(pages)
        assert cache.has_room(10)
    assert states.kept == slots // 2


def test_a_prefix_is_found_as_far_as_a_state_is_kept():
    cache = hybrid_cache()
    prefilled(cache, text_of(1, 2, tail=3), 5.0)
    pages, hit = begin(cache, text_of(1, 2, 3))
    assert hit == 2 * PAGE_SIZE
    assert state_of(cache, pages).unique().tolist() == [5.0]
    shorter, hit = begin(cache, text_of(1, 4))  # its first page is known, but no state behind it
    assert hit == 0
    assert not state_of(cache, shorter).any()


def test_the_state_least_recently_used_goes_first():
    cache = hybrid_cache(kept=2)
    for symbol in (1, 2):
        prefilled(cache, text_of(symbol, tail=8), float(symbol))
    begin(cache, text_of(1, 8))  # used again
    prefilled(cache, text_of(3, tail=8), 3.0)
    assert [begin(cache, text_of(symbol, 8))[1] for symbol in (1, 2, 3)] == [PAGE_SIZE, 0, PAGE_SIZE]
    assert cache.states.kept == 2


def test_a_state_that_is_kept_again_is_young_again():
    pool = StatePool(StateMemory(CONFIG, torch.device("cpu")))
    pool.most_kept = 2
    owners = [[page, 10 + page] for page in range(3)]
    for pages in owners:
        pool.open(pages, 0)
    for number in (0, 1, 0, 2):  # two requests computed the same text at once
        pool.keep(owners[number], 1)
    assert [pool.reach(pages) for pages in owners] == [1, 0, 1]


def test_no_room_for_a_copy_is_no_error():
    pool = StatePool(StateMemory(CONFIG, torch.device("cpu"), 2))
    pool.most_kept = 2
    owners = [[page, 10 + page] for page in range(2)]
    for pages in owners:
        pool.open(pages, 0)
    pool.keep(owners[0], 1)
    assert (pool.in_use, pool.kept, pool.reach(owners[0])) == (2, 0, 0)
    pool.close(owners[1])
    pool.keep(owners[0], 1)
    assert pool.reach(owners[0]) == 1


def test_an_evicted_page_takes_its_state_along():
    cache = hybrid_cache()
    pages, _ = prefilled(cache, text_of(1), 1.0)
    cache.free(pages, text_of(1), EVERYBODY)
    assert cache.states.kept == 1
    cache.kept_bytes = 0
    cache.allocate(1)
    assert cache.states.kept == 0


def test_states_give_memory_back_when_no_request_runs(monkeypatch):
    monkeypatch.setattr(kv_cache, "IDLE_BYTES", 0)
    cache = hybrid_cache(kept=4)
    texts = {symbol: text_of(symbol, symbol + 10, tail=8) for symbol in (1, 2)}
    for symbol, text in texts.items():
        pages, _ = prefilled(cache, text, float(symbol))
        cache.free(pages, text, EVERYBODY)
    cache.free([cache.allocate(10) for _ in range(3)][2])
    cache.rest()
    assert cache.states.slots_with_memory > 4  # two requests run
    cache = hybrid_cache(kept=4)
    for symbol, text in texts.items():
        pages, _ = prefilled(cache, text, float(symbol))
        cache.free(pages, text, EVERYBODY)
    cache.rest()
    assert cache.states.slots_with_memory == cache.states.kept == 2
    for symbol, text in texts.items():
        pages, hit = begin(cache, text)
        assert hit == 2 * PAGE_SIZE and state_of(cache, pages).unique().tolist() == [float(symbol)]


def test_a_request_waits_for_a_slot_of_a_fixed_pool_though_pages_are_free():
    states = StatePool(StateMemory(CONFIG, torch.device("cpu"), 2), requests=1)
    cache = KVCache(1, 1, 1, torch.float32, torch.device("cpu"), 8, states)
    assert cache.has_room(10)
    pages = cache.allocate(10)
    assert not cache.has_room(10)
    cache.free(pages)
    assert cache.has_room(10)


def test_nothing_is_kept_of_a_page_that_no_request_can_find():
    cache = hybrid_cache()
    pages, _ = begin(cache, text_of(1))
    cache.keep_state(pages, PAGE_SIZE, EVERYBODY)  # not shared yet
    cache.keep_state(pages, PAGE_SIZE - 1, EVERYBODY)
    assert cache.states.kept == 0


def test_where_whole_passes_alone_are_shared_no_hit_ends_within_one():
    cache, sharing, text = hybrid_cache(), Sharing(2 * PAGE_SIZE, answers=False), text_of(1, 2, 3, 4)
    pages, _ = begin(cache, text, sharing)
    cache.share(pages, text, sharing)
    cache.keep_state(pages, 3 * PAGE_SIZE, sharing)
    assert begin(cache, text, sharing)[1] == 0
    cache.keep_state(pages, 2 * PAGE_SIZE, sharing)
    assert begin(cache, text, sharing)[1] == 2 * PAGE_SIZE


def test_records_are_of_every_layer_only_where_paths_are_still_open():
    cache = hybrid_cache()
    owners = [cache.allocate(10) for _ in range(2)]
    pool, open_, final = cache.states, *(cache.batch(owners, [0, 0], final=f).states for f in (False, True))
    assert [pool.of_pass(open_, rows, trees).final for rows, trees in ((2, False), (2, True), (5, False))] == [
        True,
        False,
        False,
    ]
    assert pool.of_pass(open_, 5, True).records.shape[:2] == (2, 5)
    assert pool.of_pass(final, 5, False).records.shape[:2] == (1, 5)


@pytest.mark.parametrize("name", ["num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"])
def test_sizes_out_of_range_are_refused_by_name(name):
    sizes = {"num_key_heads": 1, "num_value_heads": 2, "key_head_dim": 3, "value_head_dim": 4}
    for value in (0, -1, 1 << 20):
        with pytest.raises(ValueError, match=f"linear {name} must be from 1"):
            GatedDeltaConfig(frozenset({0}), **{**sizes, name: value})
    with pytest.raises(ValueError, match="num_value_heads 3 must be a multiple of num_key_heads 2"):
        GatedDeltaConfig(frozenset({0}), **{**sizes, "num_key_heads": 2, "num_value_heads": 3})
