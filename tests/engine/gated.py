"""A drafter that lets a test say when each cycle begins, and what tests of a service ask again and again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine

from specengine import Engine
from specengine.drafters.none import NoneDrafter
from tests.engines import tiny_engine

LIMIT = 60  # seconds after which a test has failed; nothing takes that long


def run(task: Coroutine):
    return asyncio.run(asyncio.wait_for(task, LIMIT))


class Gated(NoneDrafter):
    """Drafts nothing; every cycle waits until the test lets it begin. batches: the prompts in each cycle."""

    def __init__(self) -> None:
        super().__init__(None, None, None)
        self.batches: list[list[tuple[int, ...]]] = []
        self.failure: Exception | None = None  # of the next cycle
        self._reached, self._gate, self._free = threading.Semaphore(0), threading.Semaphore(0), False

    def draft(self, requests):
        self.batches.append([tuple(s.tokens[: s.prompt_length]) for s in requests])
        self._reached.release()
        if not self._free and not self._gate.acquire(timeout=LIMIT):
            raise TimeoutError("the test has forgotten a cycle")
        if self.failure:
            failure, self.failure = self.failure, None
            raise failure
        return super().draft(requests)

    async def reached(self, cycles: int = 1) -> None:
        """Waits until so many more cycles wanted to begin."""
        for _ in range(cycles):
            assert await asyncio.to_thread(self._reached.acquire, timeout=LIMIT)

    async def passed(self, cycles: int = 1) -> None:
        """Lets the waiting cycle begin, and so on, and waits for the next one at the gate."""
        for _ in range(cycles):
            self._gate.release()
            await self.reached()

    def open(self) -> None:
        """Nothing waits any more."""
        self._free = True
        self._gate.release()


def gated(**options) -> tuple[Engine, Gated]:
    drafter = Gated()
    return tiny_engine(drafter, **options), drafter


async def collected(stream, skipped: int = 0) -> list[int]:
    """The tokens of a stream (behind the skipped ones), checked against the output that ends it."""
    events = [event async for event in stream]
    tokens = [token for event in events for token in event.token_ids]
    assert events[-1].output.token_ids[skipped:] == tokens
    assert all(event.output is None and event.token_ids for event in events[:-1])
    return tokens


def settled(engine) -> None:
    """No request is left, and everything is given back."""
    counts = engine.metrics.snapshot()
    assert (counts.running, counts.waiting, engine.cache.pages_in_use) == (0, 0, 0)
