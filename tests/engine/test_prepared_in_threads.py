"""What takes long to prepare leaves the event loop free, and enters the queue when it is ready."""

from __future__ import annotations

import asyncio
import threading

import pytest

from specengine import AsyncEngine, SamplingParams
from specengine.engine import engine as module
from specengine.engine.prompts import encode_prompt
from tests.engine.gated import run
from tests.engines import GREEDY, tiny_engine

LONG = ["word " * 2_001, [{"role": "user", "content": "Hi"}], [3] * 10_001, ["a" * 5_001, "b" * 5_000]]


class Tokenising:
    """Holds long prompts back until the event loop lets them go; token ids of three entries pass."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.let_go, self.seen = threading.Event(), threading.Event(), []
        monkeypatch.setattr(module, "encode_prompt", self)

    def __call__(self, prompt, tokenizer, config):
        if isinstance(prompt, list) and len(prompt) == 3:
            return encode_prompt(prompt, tokenizer, config)
        self.begun.set()
        assert self.let_go.wait(20), "the event loop was blocked"
        self.seen.append(prompt)
        return [5, 9]

    async def has_begun(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0.001)


async def drained(events) -> None:
    async for _ in events:
        pass


@pytest.mark.parametrize("prompt", LONG)
@pytest.mark.parametrize("streams", [False, True])
def test_other_requests_are_served_while_a_prompt_is_tokenised(monkeypatch, prompt, streams):
    engine = tiny_engine()
    expected = engine.generate([[5, 9], [7, 7, 7]], GREEDY)
    tokenising = Tokenising(monkeypatch)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            call = drained(serving.stream(prompt, GREEDY)) if streams else serving.generate(prompt, GREEDY)
            long = asyncio.create_task(call)
            await tokenising.has_begun()
            assert (await serving.generate([7, 7, 7], GREEDY)).token_ids == expected[1].token_ids
            tokenising.let_go.set()
            await long
        texts = 2 + 1 + len(tokenising.seen)
        assert engine.metrics.snapshot().generated_tokens == 48 * texts

    run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_is_cancelled_meanwhile_enters_no_queue(monkeypatch, streams):
    engine, tokenising = tiny_engine(), Tokenising(monkeypatch)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            call = anext(serving.stream(LONG[0], GREEDY)) if streams else serving.generate(LONG[0], GREEDY)
            long = asyncio.ensure_future(call)
            await tokenising.has_begun()
            long.cancel()
            with pytest.raises(asyncio.CancelledError):
                await long
            tokenising.let_go.set()
            await serving.generate([7, 7, 7], GREEDY)

    run(main())
    assert engine.metrics.snapshot().finished == {"length": 1}


def test_the_deadline_counts_from_the_call(monkeypatch):
    engine, tokenising = tiny_engine(), Tokenising(monkeypatch)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            long = asyncio.create_task(serving.generate(LONG[0], GREEDY, deadline=0.05))
            await tokenising.has_begun()
            await asyncio.sleep(0.06)
            tokenising.let_go.set()
            output = await long
            assert (output.finish_reason, output.token_ids) == ("deadline", [])

    run(main())


def test_what_never_fits_is_refused_before_any_request_is_made(monkeypatch):
    monkeypatch.setattr(module, "encode_prompt", lambda *_: pytest.fail("a prompt was tokenised"))

    async def main() -> None:
        async with AsyncEngine(tiny_engine(), max_waiting=8) as serving:
            with pytest.raises(ValueError, match=r"10000 requests never fit into the [0-9]+ places of batch and queue"):
                await serving.generate([5], SamplingParams(n=10_000))

    run(main())
