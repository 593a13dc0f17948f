"""Pools that several threads use at once: each call is one step, none sees half of another.

ThreadSanitizer (`.ci/sanitize thread`) is what makes these tests sharp.
"""

import random

import torch

from specengine._C import PhrasePool, SuffixAutomaton, TextCorpus, sort_suffixes
from specengine.drafters.suffix.text_memory import TextMemory
from tests.pools.searching import WHOLE
from tests.threads import CALLERS, at_once

ROUNDS = 200
PIECES = [[10 * caller + i for i in range(6)] for caller in range(CALLERS)]


def test_phrases_of_all_threads_are_there():
    pool = PhrasePool(2, ROUNDS, CALLERS)

    def work(caller: int) -> None:
        for i in range(ROUNDS):
            pool.insert(caller, [caller, i])
            assert pool.newest(caller, 1) == [[caller, i]]
            pool.replace(caller, [caller, i], [caller, ROUNDS + i])
            pool.newest((caller + 1) % CALLERS, 3), pool.tokens(), len(pool)

    at_once(work)
    assert sorted(pool.tokens()) == list(range(CALLERS)) and len(pool) == CALLERS * ROUNDS
    for caller in range(CALLERS):
        assert sorted(pool.newest(caller, ROUNDS)) == [[caller, ROUNDS + i] for i in range(ROUNDS)]


def test_texts_of_all_threads_are_counted():
    text = SuffixAutomaton()

    def work(caller: int) -> None:
        for i in range(ROUNDS):
            text.append(PIECES[caller])
            assert text.count(PIECES[caller]) == i + 1
            tokens, parents, _ = text.continuations(PIECES[caller][:3], 8, 4, 2, WHOLE, 0.0)
            assert len(tokens) == len(parents) and PIECES[caller][3] in tokens
            text.cut()

    at_once(work)
    assert [text.count(piece) for piece in PIECES] == [ROUNDS] * CALLERS


def test_a_corpus_is_searched_while_others_are_sorted():
    rng = random.Random(0)
    tokens = torch.tensor([rng.choice([-1, 0, 1, 2, 3]) for _ in range(3000)], dtype=torch.int32)
    order = torch.empty_like(tokens)
    sort_suffixes(tokens, order)
    corpus = TextCorpus(tokens, order)
    contexts = [[rng.randrange(4) for _ in range(8)] for _ in range(20)]
    expected = [corpus.continuations(context, 16, 4, 3, WHOLE, 0.0) for context in contexts]

    def work(caller: int) -> None:
        for _ in range(5):
            if caller % 2:
                own = torch.empty_like(order)
                sort_suffixes(tokens, own)  # the same text, without the GIL
                assert torch.equal(own, order)
            else:
                found = [corpus.continuations(context, 16, 4, 3, WHOLE, 0.0) for context in contexts]
                assert found == expected

    at_once(work)


def test_a_memory_takes_texts_while_it_is_searched():
    memory = TextMemory(10_000)

    def work(caller: int) -> None:
        for _ in range(ROUNDS):
            memory.add(list(PIECES[caller]))
            for text in memory.automata():
                text.continuations(PIECES[caller][:2], 8, 4, 2, WHOLE, 0.0)

    at_once(work)
    assert [sum(text.count(piece) for text in memory.automata()) for piece in PIECES] == [ROUNDS] * CALLERS
