"""Ranks killed with signal 9 at random points: what the caller sees, and what is left of them."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import psutil
import pytest

from specengine import Engine, RankFailed, SamplingParams
from tests.engines import ids

SOON = 10.0  # seconds; a dead rank is seen at once, but the machine may be busy


class Kill(NamedTuple):
    """when: loading, generating, or later, when the texts were there.  seconds: from the kill to the error."""

    when: str
    seconds: float


def ranks(process: int | None = None) -> list[psutil.Process]:
    """Processes that serve as ranks of a process's engines; None: of this one's."""
    found = []
    for child in psutil.Process(process).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("specengine.tensor_parallel.worker" in argument for argument in child.cmdline()):
                found.append(child)
    return found


def own(others: set[int]) -> list[psutil.Process]:
    """The ranks that are not among the others, by their process ids."""
    return [child for child in ranks() if child.pid not in others]


def check_over(failed: Engine, others: set[int]) -> None:
    """A failed engine says so at once, and has left no process."""
    begin = time.monotonic()
    while failed.healthy:
        assert time.monotonic() - begin < SOON
    with pytest.raises(RankFailed):
        failed.generate([7])
    with pytest.raises(RankFailed, match="make a new engine"):
        failed.generate([7])
    assert time.monotonic() - begin < SOON and not own(others)


def kills(
    engine: Callable[[], Engine],
    prompts: list[list[int]],
    params: SamplingParams,
    expected: list[list[int]],
    rounds: int,
    seed: int,
) -> Iterator[Kill]:
    """One engine after the other, whose rank is killed by turns while it generates and while it loads."""
    draw, others = random.Random(seed), {child.pid for child in ranks()}
    begin = time.monotonic()
    usual = engine()
    loading = time.monotonic() - begin
    assert ids(usual.generate(prompts, params)) == expected
    generating = time.monotonic() - begin - loading
    del usual
    for number in range(rounds):
        killer, started, when = Killer(others), None, "loading"
        if number % 2:
            killer.after(draw.random() * loading)
        try:
            started, when = engine(), "generating"
            if not number % 2:
                killer.after(draw.random() * generating)
            assert ids(started.generate(prompts, params)) == expected
            when = "later"
        except RankFailed as error:
            assert "was ended by signal 9" in str(error)
        took = killer.seconds_since()
        assert took < SOON, f"{when}: the error came {took:.1f} s after the kill"
        killer.join()
        if started is not None:
            check_over(started, others)
        assert not own(others)
        yield Kill(when, took)


class Killer:
    """Kills the rank of the engine that is being made, some seconds from now, or as soon as it is there."""

    def __init__(self, others: set[int]) -> None:
        self.others, self.killed = others, None

    def after(self, seconds: float) -> None:
        self.thread = threading.Thread(target=self._run, args=(time.monotonic() + seconds,))
        self.thread.start()

    def _run(self, due: float) -> None:
        while not (found := own(self.others)) or time.monotonic() < due:
            time.sleep(0.001)
        self.killed = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            found[0].kill()  # and no wait: how it ended is for the engine to learn

    def seconds_since(self) -> float:
        return time.monotonic() - self.killed if self.killed else 0.0

    def join(self) -> None:
        self.thread.join()
