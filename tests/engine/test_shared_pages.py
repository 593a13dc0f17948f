"""Who shares which pages: the cache against a naive account of every text and page."""

from dataclasses import dataclass, field

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specengine._C import PAGE_SIZE
from tests.cache.small_caches import EVERYBODY, begin, new_cache, text_of

MODULUS = 2**61 - 1  # Python's hash of an integer is its rest
SYMBOLS = (7, 7 + MODULUS, 7 + 2 * MODULUS)  # texts of these have equal hashes wherever they have equal lengths


@dataclass(eq=False)
class Held:
    """A request that is alive."""

    text: list[int]
    pages: list[int]
    reads: bool
    begun: set[tuple] = field(default_factory=set)  # beginnings that it shares with others


class SharedPages(RuleBasedStateMachine):
    """Beginnings are whole pages of a text and the token behind them; `known` says of each that can be found when it
    was last let go, and `filled` are those that somebody has read."""

    @initialize(fixed=st.booleans())
    def open(self, fixed):
        self.fixed, self.size, self.most = fixed, 7, 3
        self.cache = new_cache(self.size) if fixed else new_cache(kept_pages=self.most)
        self.beside = self.cache.companion(1, 1, 1, torch.float32)
        self.cache.kept_bytes *= 2
        self.held, self.known, self.filled, self.time, self.evicted = [], {}, set(), 0, 0

    def beginnings(self, text, tokens):
        ends = range(PAGE_SIZE, tokens, PAGE_SIZE)
        return [tuple(text[: end + 1]) for end in ends]

    def users(self, beginning):
        return sum(beginning in each.begun for each in self.held)

    def evict(self):
        unused = [beginning for beginning in self.known if not self.users(beginning)]
        beginning = min(unused, key=self.known.get)
        del self.known[beginning]
        self.filled.discard(beginning)
        self.evicted += 1

    def unused(self):
        return sum(not self.users(beginning) for beginning in self.known)

    def written(self, each):
        """What the pages should hold: each page the number of its symbol, and that of the token behind it."""
        for beginning in self.beginnings(each.text, len(each.text)):
            place = len(beginning) // PAGE_SIZE - 1
            yield each.pages[place], SYMBOLS.index(beginning[-2]), SYMBOLS.index(beginning[-1])

    @rule(symbols=st.lists(st.sampled_from(SYMBOLS), max_size=3), tail=st.sampled_from(SYMBOLS), reads=st.booleans())
    def a_sequence_begins(self, symbols, tail, reads):
        text = text_of(*symbols, tail=tail)
        need = len(text) // PAGE_SIZE + 1
        promised = sum(len(each.pages) for each in self.held)
        assert self.cache.has_room(len(text) + 1) == (not self.fixed or need <= self.size - promised)
        if not self.cache.has_room(len(text) + 1):
            return
        found = 0
        ours = self.beginnings(text, len(text))
        while found < len(ours) and ours[found] in (self.filled if reads else self.known):
            found += 1
        pages, hit = begin(self.cache, text, filled=reads)
        assert hit == found * PAGE_SIZE and len(pages) == need
        each = Held(text, pages, reads, set(ours[:found]))
        self.held.append(each)
        if self.fixed:
            physical = len({page for other in self.held for page in other.pages})
            while physical + self.unused() > self.size:
                self.evict()
        for page, symbol, behind in list(self.written(each))[found:]:
            self.cache.k[0, page], self.cache.v[0, page] = symbol, behind
            self.beside.k[0, page], self.beside.v[0, page] = (symbol, behind) if reads else (-1, -1)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_sequence_shares(self, data):
        each = data.draw(st.sampled_from(self.held))
        filled = data.draw(st.integers(0, len(each.text)))
        self.cache.share(each.pages, each.text[:filled], EVERYBODY, each.reads)
        self.learn(each, filled)

    def learn(self, each, filled):
        for beginning in self.beginnings(each.text, filled):
            self.known.setdefault(beginning, 0)
            each.begun.add(beginning)
            if each.reads:
                self.filled.add(beginning)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_sequence_ends(self, data):
        each = data.draw(st.sampled_from(self.held))
        filled = data.draw(st.integers(0, len(each.text)))
        self.cache.free(each.pages, each.text[:filled], EVERYBODY, each.reads)
        self.learn(each, filled)
        self.held.remove(each)
        for beginning in sorted(each.begun, key=len, reverse=True):
            self.time += 1
            self.known[beginning] = self.time
        while not self.fixed and self.unused() > self.most:
            self.evict()

    @rule()
    def the_engine_rests(self):
        self.cache.rest()

    @invariant()
    def pages_hold_what_their_requests_wrote(self):
        for each in self.held:
            for page, symbol, behind in self.written(each):
                for pool in (self.cache, self.beside) if each.reads else (self.cache,):
                    assert (pool.k[0, page] == symbol).all() and (pool.v[0, page] == behind).all()

    @invariant()
    def every_page_is_in_use_or_kept_or_free(self):
        in_use = {page for each in self.held for page in each.pages}
        assert self.cache.pages_in_use == len(in_use)
        index, free = self.cache._known, self.cache._free
        back = free._back
        assert len({*back}) == len(back) and not {*back} & (in_use | {*index.pages})
        assert len(free) + len(in_use | {*index.pages}) == self.cache.k.shape[1]
        assert index.unused == self.unused() == len({*index.pages} - in_use)
        for page, node in index._nodes.items():
            assert node.users == sum(page in each.pages for each in self.held)

    @invariant()
    def what_is_filled_is_found_as_it_was_written(self):
        assert self.cache.prefixes.cached == len(self.known)  # takes in what was given back
        index = self.cache._known
        assert sum(node.filled for node in index._nodes.values()) == len(self.filled)
        assert all(node.filled <= (node.parent is None or node.parent.filled) for node in index._nodes.values())
        for beginning in self.filled:
            page = index.find(EVERYBODY, beginning)[-1]
            assert (self.beside.k[0, page] == SYMBOLS.index(beginning[-2])).all()
            assert (self.beside.v[0, page] == SYMBOLS.index(beginning[-1])).all()

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
