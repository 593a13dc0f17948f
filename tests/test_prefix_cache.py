"""Who shares which pages: the cache against a naive account of every text and page."""

import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from specengine._C import PAGE_SIZE

from specengine import kv_cache as cache_module
from specengine.kv_cache import KVCache
from specengine.prefix_cache import PrefixCounts, Sharing

MODULUS = 2**61 - 1  # Python's hash of an integer is its rest
SYMBOLS = (7, 7 + MODULUS, 7 + 2 * MODULUS)  # texts of these have equal hashes wherever they have equal lengths
EVERYBODY = Sharing()


def new_cache(pages=None, kept_pages=0):
    cache = KVCache(1, 1, 1, torch.float32, torch.device("cpu"), pages)
    cache.kept_bytes = kept_pages * cache.page_bytes
    return cache


def text_of(*symbols, tail=7):
    """A page of each symbol, and a token behind them."""
    return [symbol for symbol in symbols for _ in range(PAGE_SIZE)] + [tail]


def begin(cache, text, sharing=EVERYBODY):
    return cache.begin(len(text) + 1, text, sharing)


def keep(cache, text, sharing=EVERYBODY):
    """A sequence of this text comes and goes."""
    pages, hit = begin(cache, text, sharing)
    cache.free(pages, text, sharing)
    return pages, hit


@dataclass(eq=False)
class Held:
    """A sequence that is alive."""

    text: list[int]
    pages: list[int]
    begun: set[tuple] = field(default_factory=set)  # beginnings that it shares with others


class SharedPages(RuleBasedStateMachine):
    """Beginnings are whole pages of a text and the token behind them; `known` says of each that can be found when it
    was last let go."""

    @initialize(fixed=st.booleans())
    def open(self, fixed):
        self.fixed, self.size, self.most = fixed, 7, 3
        self.cache = new_cache(self.size) if fixed else new_cache(kept_pages=self.most)
        self.held, self.known, self.time, self.evicted = [], {}, 0, 0

    def beginnings(self, text, tokens):
        ends = range(PAGE_SIZE, tokens, PAGE_SIZE)
        return [tuple(text[: end + 1]) for end in ends]

    def users(self, beginning):
        return sum(beginning in each.begun for each in self.held)

    def evict(self):
        unused = [beginning for beginning in self.known if not self.users(beginning)]
        del self.known[min(unused, key=self.known.get)]
        self.evicted += 1

    def unused(self):
        return sum(not self.users(beginning) for beginning in self.known)

    def written(self, each):
        """What the pages should hold: each page the number of its symbol, and that of the token behind it."""
        for beginning in self.beginnings(each.text, len(each.text)):
            place = len(beginning) // PAGE_SIZE - 1
            yield each.pages[place], SYMBOLS.index(beginning[-2]), SYMBOLS.index(beginning[-1])

    @rule(symbols=st.lists(st.sampled_from(SYMBOLS), max_size=3), tail=st.sampled_from(SYMBOLS))
    def a_sequence_begins(self, symbols, tail):
        text = text_of(*symbols, tail=tail)
        need = len(text) // PAGE_SIZE + 1
        promised = sum(len(each.pages) for each in self.held)
        assert self.cache.has_room(len(text) + 1) == (not self.fixed or need <= self.size - promised)
        if not self.cache.has_room(len(text) + 1):
            return
        found = 0
        ours = self.beginnings(text, len(text))
        while found < len(ours) and ours[found] in self.known:
            found += 1
        pages, hit = begin(self.cache, text)
        assert hit == found * PAGE_SIZE and len(pages) == need
        each = Held(text, pages, set(ours[:found]))
        self.held.append(each)
        if self.fixed:
            physical = len({page for other in self.held for page in other.pages})
            while physical + self.unused() > self.size:
                self.evict()
        for page, symbol, behind in list(self.written(each))[found:]:
            self.cache.k[0, page], self.cache.v[0, page] = symbol, behind

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_sequence_shares(self, data):
        each = data.draw(st.sampled_from(self.held))
        filled = data.draw(st.integers(0, len(each.text)))
        self.cache.share(each.pages, each.text[:filled], EVERYBODY)
        self.learn(each, filled)

    def learn(self, each, filled):
        for beginning in self.beginnings(each.text, filled):
            self.known.setdefault(beginning, 0)
            each.begun.add(beginning)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_sequence_ends(self, data):
        each = data.draw(st.sampled_from(self.held))
        filled = data.draw(st.integers(0, len(each.text)))
        self.cache.free(each.pages, each.text[:filled], EVERYBODY)
        self.learn(each, filled)
        self.held.remove(each)
        for beginning in sorted(each.begun, key=len, reverse=True):
            self.time += 1
            self.known[beginning] = self.time
        while not self.fixed and self.unused() > self.most:
            self.evict()

    @invariant()
    def pages_hold_what_their_sequences_wrote(self):
        for each in self.held:
            for page, symbol, behind in self.written(each):
                assert (self.cache.k[0, page] == symbol).all() and (self.cache.v[0, page] == behind).all()

    @invariant()
    def every_page_is_in_use_or_kept_or_free(self):
        in_use = {page for each in self.held for page in each.pages}
        assert self.cache.pages_in_use == len(in_use)
        index, free = self.cache._known, self.cache._free
        assert len(set(free)) == len(free) and not {*free} & (in_use | {*index.pages})
        assert len(free) + len(in_use | {*index.pages}) == self.cache.k.shape[1]
        assert index.unused == self.unused() == len({*index.pages} - in_use)
        for page, node in index._nodes.items():
            assert node.users == sum(page in each.pages for each in self.held)

    @invariant()
    def only_texts_that_begin_alike_share(self):
        for i, one in enumerate(self.held):
            for other in self.held[:i]:
                both = {*one.pages} & {*other.pages}
                assert both == {one.pages[len(b) // PAGE_SIZE - 1] for b in one.begun & other.begun}

    @invariant()
    def it_counts(self):
        counts = self.cache.prefixes
        assert (counts.evicted, counts.cached) == (self.evicted, len(self.known))


TestSharedPages = SharedPages.TestCase
TestSharedPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_symbols_of_the_naive_account_collide():
    assert len({hash((EVERYBODY, *text_of(symbol))) for symbol in SYMBOLS}) == 1


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
    assert cache.prefixes.looked_up == 2 * (PAGE_SIZE + 1)  # who shares with nobody asks nobody


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
        cache.begin(4 * PAGE_SIZE, text_of(1), EVERYBODY)
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


def test_a_large_pool_is_let_go_but_for_what_is_kept(monkeypatch):
    monkeypatch.setattr(cache_module, "IDLE_BYTES", 0)
    cache = new_cache(kept_pages=2)
    beside = cache.companion(1, 1, 2, torch.float32)
    cache.kept_bytes = 2 * (cache.page_bytes + beside.page_bytes)
    cache.free(cache.allocate(20 * PAGE_SIZE))
    pages, _ = begin(cache, text_of(5, 6))
    assert cache.k.shape[1] < 20
    for number, page in enumerate(pages):
        cache.k[:, page], beside.v[:, page] = number, -number
    cache.free(pages, text_of(5, 6), EVERYBODY)
    cache.free(cache.allocate(30 * PAGE_SIZE))
    assert cache.k.shape[1] > 30
    pages, hit = begin(cache, text_of(5, 6))
    assert hit == 2 * PAGE_SIZE and cache.k.shape[1] == beside.k.shape[1] == 5
    for number, page in enumerate(pages[:2]):
        assert (cache.k[:, page] == number).all() and (beside.v[:, page] == -number).all()


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
