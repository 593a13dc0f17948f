"""Kills ranks with signal 9 at random points, and checks the caller's error and the processes left."""

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

SOON = 10.0  # seconds; a dead rank is noticed at once, but the machine may be busy


class Kill(NamedTuple):
    """One kill. when: loading, generating, or later, after the texts.  seconds: from the kill to the error."""

    when: str
    seconds: float


def ranks(process: int | None = None) -> list[psutil.Process]:
    """Lists the processes that are ranks of a process's engines; None stands for this process."""
    found = []
    for child in psutil.Process(process).children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("specengine.tensor_parallel.worker" in argument for argument in child.cmdline()):
                found.append(child)
    return found


def own(others: set[int]) -> list[psutil.Process]:
    """Lists the ranks whose process ids are not among `others`."""
    return [child for child in ranks() if child.pid not in others]


def check_over(failed: Engine, others: set[int]) -> None:
    """Checks that a failed engine reports it at once and has left no process."""
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
    """Makes one engine after the other; its rank is killed while it loads, then while it generates, in turn."""
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
    """Kills the rank of the next engine: some seconds from now, or as soon as it runs."""

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
            found[0].kill()  # and no wait(): the engine must collect the status

    def seconds_since(self) -> float:
        return time.monotonic() - self.killed if self.killed else 0.0

    def join(self) -> None:
        self.thread.join()
