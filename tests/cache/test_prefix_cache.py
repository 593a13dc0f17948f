"""How texts are found, counted, kept and evicted in the pages of the cache."""

import threading

import pytest
import torch

from specengine._C import PAGE_SIZE
from specengine.cache import kv_cache as cache_module
from specengine.cache.kv_cache import KVCache
from specengine.cache.prefix_cache import PrefixCounts, Sharing
from tests.cache.small_caches import EVERYBODY, begin, new_cache, text_of


def keep(cache, text, sharing=EVERYBODY, filled=True):
    """A request of this text comes and goes."""
    pages, hit = begin(cache, text, sharing, filled)
    cache.free(pages, text, sharing, filled)
    return pages, hit


def test_a_page_is_found_by_its_tokens_and_the_one_behind_them():
    cache = new_cache(kept_pages=9)
    first, _ = keep(cache, text_of(1, 2, tail=3))
    for text, expected in (
        (text_of(1, 2, tail=3), 2),
        (text_of(1, 2, tail=4), 1),
        (text_of(1, 3, tail=3), 0),
        (text_of(1, 2, tail=3)[:-1], 1),  # its last page has no token behind it
        (text_of(2, 1, tail=3), 0),
    ):
        pages, hit = begin(cache, text)
        assert hit == expected * PAGE_SIZE and pages[:expected] == first[:expected]
        assert not {*pages[expected:]} & {*first[:2]}
        cache.free(pages)


def test_counts_are_of_prompt_tokens():
    cache = new_cache(kept_pages=2)
    assert cache.prefixes == PrefixCounts() and cache.prefixes.hit_rate == 0
    for text in (text_of(1, 2), text_of(1, 2), text_of(3)):
        keep(cache, text)
    assert cache.pages_in_use == 0
    assert cache.prefixes == PrefixCounts(looked_up=5 * PAGE_SIZE + 3, hit=2 * PAGE_SIZE, evicted=1, cached=2)
    assert cache.prefixes.hit_rate == 128 / 323


def test_others_and_those_who_share_with_nobody_find_nothing():
    cache = new_cache(kept_pages=9)
    keep(cache, text_of(1))
    assert begin(cache, text_of(1), Sharing())[1] == begin(cache, text_of(1), None)[1] == 0
    assert cache.prefixes.looked_up == 2 * (PAGE_SIZE + 1)  # a request that shares nothing looks nothing up


def test_a_hit_ends_at_a_whole_step():
    cache, steps = new_cache(5), Sharing(step=2 * PAGE_SIZE)
    keep(cache, text_of(1, 2, 3), steps)
    assert cache.prefixes.cached == 2  # the third page is half a step
    assert begin(cache, text_of(1, 2, 3), steps)[1] == 2 * PAGE_SIZE
    cache = new_cache(5)
    keep(cache, text_of(1, 2, 3, 4), steps)
    cache.free(cache.allocate(2 * PAGE_SIZE))
    assert cache.prefixes.cached == 3  # the second step has lost its end
    assert begin(cache, text_of(1, 2, 3, 4), steps)[1] == 2 * PAGE_SIZE


def test_the_last_pages_of_what_was_used_least_recently_are_evicted_first():
    cache = new_cache(6)
    for text in (text_of(1, 2), text_of(3, 4), text_of(1, 2)):  # the first one is asked for again
        keep(cache, text)
    cache.free(cache.allocate(3 * PAGE_SIZE))  # two pages were free
    hits = [keep(cache, text)[1] // PAGE_SIZE for text in (text_of(3, 4), text_of(1, 2))]
    assert hits == [1, 2] and cache.prefixes.evicted == 1


def test_a_fixed_pool_evicts_nothing_that_is_in_use():
    cache = new_cache(4)
    keep(cache, text_of(1, 2))
    pages, hit = begin(cache, text_of(1, 2))
    assert hit == 2 * PAGE_SIZE and cache.has_room(PAGE_SIZE) and not cache.has_room(2 * PAGE_SIZE)
    with pytest.raises(MemoryError, match="2 pages are needed, 1 of 4 are free"):
        cache.allocate(2 * PAGE_SIZE)
    assert not {*cache.allocate(PAGE_SIZE)} & {*pages}


def test_who_finds_no_room_holds_nothing():
    cache = new_cache(3)
    keep(cache, text_of(1))
    with pytest.raises(MemoryError):
        cache.allocate_with_prefix(4 * PAGE_SIZE, text_of(1), EVERYBODY)
    assert cache.pages_in_use == 0 and cache.has_room(3 * PAGE_SIZE)
    assert len(cache.allocate(3 * PAGE_SIZE)) == 3


def test_texts_that_were_cached_twice_have_one_place():
    cache = new_cache(kept_pages=9)
    one, other = (begin(cache, text_of(1, 2))[0] for _ in range(2))
    cache.share(one, text_of(1, 2), EVERYBODY)
    own = [*other]
    cache.share(other, text_of(1, 2), EVERYBODY)
    assert other == [*one[:2], own[2]] and cache.pages_in_use == 4
    cache.free(one)
    cache.free(other)
    assert cache.pages_in_use == 0


def test_only_those_who_read_need_filled_pages():
    cache = new_cache(kept_pages=9)
    keep(cache, text_of(1, 2), filled=False)
    assert begin(cache, text_of(1, 2), filled=False)[1] == 2 * PAGE_SIZE
    assert begin(cache, text_of(1, 2))[1] == 0
    keep(cache, text_of(1, tail=2))
    assert begin(cache, text_of(1, 2))[1] == PAGE_SIZE
    assert begin(cache, text_of(1, 2), filled=False)[1] == 2 * PAGE_SIZE and cache.prefixes.cached == 2


def test_pages_are_filled_while_others_hold_them():
    """The holder of a page holds those before it, so another page cannot take its place."""
    cache = new_cache(7)
    beside = cache.companion(1, 1, 2, torch.float32)
    cache.k.zero_(), beside.k.fill_(-1.0), beside.v.fill_(-1.0)
    unread, _ = begin(cache, text_of(1, 2), filled=False)
    cache.share(unread, text_of(1, 2), EVERYBODY, False)
    read, hit = begin(cache, text_of(1, tail=2))
    own = read[0]
    assert hit == 0 and own != unread[0]
    beside.k[:, own], beside.v[:, own] = 3.0, 4.0
    cache.share(read, text_of(1, tail=2), EVERYBODY)
    assert read[0] == unread[0] and (beside.k[:, read[0]] == 3.0).all() and (beside.v[:, read[0]] == 4.0).all()
    cache.free(read)
    cache.allocate(2 * PAGE_SIZE)  # one of the replaced page
    cache.free(unread)
    found, hit = begin(cache, text_of(1, 2))
    assert hit == PAGE_SIZE and found[0] == unread[0]
    assert begin(cache, text_of(1, 2), filled=False)[1] == 2 * PAGE_SIZE


def test_what_is_kept_keeps_to_its_bytes_and_counts_companions():
    cache = new_cache(kept_pages=4)
    companion = cache.companion(1, 1, 3, torch.float32)  # three times as much beside every page
    assert companion.page_bytes == 3 * cache.page_bytes
    keep(cache, text_of(1, 2, 3))
    assert begin(cache, text_of(1, 2, 3))[1] == PAGE_SIZE


def test_nothing_is_kept_where_no_bytes_are_for_it():
    cache = new_cache()
    keep(cache, text_of(1))
    assert begin(cache, text_of(1))[1] == 0 and cache.prefixes.evicted == 1


def test_companions_give_memory_back_and_keep_what_is_kept(monkeypatch):
    monkeypatch.setattr(cache_module, "IDLE_BYTES", 0)
    cache = KVCache(1, 8, 8, torch.float32, torch.device("cpu"))  # a page of keys is a multiple of the system's page
    beside = cache.companion(1, 8, 16, torch.float32)
    cache.kept_bytes = 2 * (cache.page_bytes + beside.page_bytes)
    pages, _ = begin(cache, text_of(5, 6, 7))
    for number, page in enumerate(pages):
        cache.k[:, page], beside.v[:, page] = 1 + number, -1 - number
    cache.free(pages, text_of(5, 6), EVERYBODY)
    cache.rest()
    pages, hit = begin(cache, text_of(5, 6))
    assert hit == 2 * PAGE_SIZE
    assert [int(cache.k[0, page, 0, 0, 0]) for page in pages] == [1, 2, 0]
    assert [int(beside.v[0, page, 0, 0, 0]) for page in pages] == [-1, -2, 0]


def test_pages_may_be_given_back_in_any_thread_while_others_begin():
    """Every page holds the symbol of its text whenever somebody finds it."""
    cache, failures, work = new_cache(40), [], threading.Lock()  # one at a time begins and writes, as in turns

    def run(seed):
        for i in range(200):
            symbol = (seed + i) % 5
            text = text_of(symbol, symbol + 1, tail=symbol)
            with work:
                pages, hit = begin(cache, text)
                expected = torch.tensor([symbol, symbol + 1])[: hit // PAGE_SIZE]
                if not torch.equal(cache.k[0, pages[: hit // PAGE_SIZE], 0, 0, 0], expected.float()):
                    failures.append(text)
                for page, number in [*zip(pages, (symbol, symbol + 1), strict=False)][hit // PAGE_SIZE :]:
                    cache.k[0, page] = number
            cache.free(pages, text, EVERYBODY)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and cache.pages_in_use == 0
    assert cache.prefixes.hit > 0 and cache.prefixes.cached == 10
