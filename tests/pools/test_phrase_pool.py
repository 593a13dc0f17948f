"""PhrasePool against lists."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specengine._C import PhrasePool

tokens = st.integers(0, 4)
phrases = st.tuples(st.integers(0, 2), st.integers(0, 2))
steps = st.lists(
    st.one_of(st.tuples(st.just("insert"), tokens, phrases), st.tuples(st.just("replace"), tokens, phrases, phrases)),
    max_size=60,
)


@given(steps, st.integers(1, 4), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_it_is_lists_of_bounded_length(steps, width, keys):
    pool, model = PhrasePool(2, width, keys), {}  # a dict keeps the order of insertion
    for action, token, *about in steps:
        if action == "insert":
            own = model.pop(token, [])
            model[token] = [*(phrase for phrase in own if phrase != about[0]), about[0]][-width:]
            if len(model) > keys:
                del model[next(iter(model))]
        elif about[0] in model.get(token, ()):
            before, after = about
            own = model[token]
            own[own.index(before)] = after
            if own.count(after) == 2:
                own.remove(after)
        pool.insert(token, about[0]) if action == "insert" else pool.replace(token, *about)
        assert pool.tokens() == list(model)
        assert len(pool) == sum(map(len, model.values()))
    for token in range(5):
        for most in (0, 1, 2, 10):
            own = [list(phrase) for phrase in model.get(token, [])]
            assert pool.newest(token, most) == own[len(own) - min(most, len(own)) :]


def test_a_read_does_not_make_a_phrase_younger():
    pool = PhrasePool(1, 2, 10)
    pool.insert(5, [1]), pool.insert(5, [2])
    assert pool.newest(5, 1) == [[2]] and pool.newest(5, 2) == [[1], [2]]
    pool.insert(5, [3])
    assert pool.newest(5, 2) == [[2], [3]]


def test_a_phrase_inserted_again_becomes_the_newest():
    pool = PhrasePool(1, 2, 10)
    for token in (1, 2, 1, 3):
        pool.insert(5, [token])
    assert pool.newest(5, 2) == [[1], [3]]


def test_a_replaced_phrase_keeps_its_age():
    pool = PhrasePool(1, 3, 10)
    for token in (1, 2, 3):
        pool.insert(5, [token])
    pool.replace(5, [2], [9])
    assert pool.newest(5, 3) == [[1], [9], [3]]
    pool.replace(5, [2], [8])  # gone already
    pool.replace(6, [2], [8])
    assert pool.newest(5, 3) == [[1], [9], [3]]
    pool.replace(5, [9], [9])
    assert len(pool) == 3


@pytest.mark.parametrize(
    "sizes, message", [((0, 1, 1), "length"), ((1, 0, 1), "width"), ((1, 1, 0), "keys"), ((1000, 1000, 1), "width")]
)
def test_wrong_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        PhrasePool(*sizes)


def test_a_phrase_of_another_length_is_refused():
    pool = PhrasePool(2, 2, 2)
    for call in (lambda: pool.insert(1, [1]), lambda: pool.replace(1, [1, 2], [1])):
        with pytest.raises(ValueError, match="phrase: expected 2 tokens, got 1"):
            call()
    assert len(pool) == 0


GROWTH = """
import os
import subprocess
import sys
from pathlib import Path

from specengine._C import PhrasePool

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

pool, before = PhrasePool(6, 15, 40_000), resident()
for token in range(60_000):
    for phrase in range(20):
        pool.insert(token, [phrase] * 6)
print(len(pool), resident() - before, pool.most_bytes)
"""


@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer's allocator pads every block")
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs Linux's /proc to see a process's memory")
def test_its_memory_stays_below_what_it_states():
    # in a process of its own: this one has memory of earlier tests to give
    run = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True)
    assert not run.returncode, run.stderr
    phrases, grown, stated = map(int, run.stdout.split())
    assert phrases == 40_000 * 15
    assert phrases * 6 * 4 < grown < stated + 2**20  # tokens alone; all, and a page here and there
