"""Requests that end early: cancelled, late, or dropped by close()."""

import asyncio
import gc
import weakref

import pytest

from specengine import AsyncEngine, Closed, SamplingParams
from specengine.engine import background_loop
from tests.engine.gated import collected, gated, run, settled
from tests.engines import GREEDY, tiny_engine

LONG = SamplingParams(max_new_tokens=60)


@pytest.mark.parametrize("how", ["task", "stream"])
def test_a_cancelled_request_is_gone_before_the_next_cycle(how):
    engine, gate = gated()

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            stays = asyncio.create_task(serving.generate([5, 6], LONG))
            await gate.reached()
            if how == "task":
                goes = asyncio.create_task(serving.generate([7, 8], LONG))
                await asyncio.sleep(0)
                await gate.passed(2)
                goes.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await goes
            else:
                goes = serving.stream([7, 8], LONG)
                event = asyncio.create_task(anext(goes))
                await asyncio.sleep(0)
                await gate.passed(2)
                await event
                await goes.aclose()
            pages = engine.cache.pages_in_use
            await gate.passed()
            assert gate.batches[-2:] == [[(5, 6), (7, 8)], [(5, 6)]]
            assert engine.cache.pages_in_use == pages // 2
            gate.open()
            assert (await stays).token_ids == tiny_engine("none").generate([5, 6], LONG).token_ids

    run(main())
    settled(engine)
    assert engine.metrics.snapshot().finished == {"cancelled": 1, "length": 1}


def test_a_cancelled_request_leaves_the_queue_without_having_run():
    engine, gate = gated(max_batch_size=1)

    async def main() -> None:
        async with AsyncEngine(engine, max_waiting=1) as serving:
            stays = asyncio.create_task(serving.generate([5], LONG))
            await gate.reached()
            goes = asyncio.create_task(serving.generate([6], LONG))
            await asyncio.sleep(0)
            goes.cancel()
            await asyncio.gather(goes, return_exceptions=True)
            await gate.passed()
            next_one = asyncio.create_task(serving.generate([7], LONG))  # its place is free
            gate.open()
            await asyncio.gather(stays, next_one)

    run(main())
    settled(engine)
    assert [(6,)] not in gate.batches and [(7,)] in gate.batches


def test_a_request_is_cancelled_in_the_middle_of_its_prompt():
    engine, gate = gated()
    long = [3 + i % 200 for i in range(400)]

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            stays = asyncio.create_task(serving.generate([5], LONG))
            await gate.reached()
            pages = engine.cache.pages_in_use
            goes = asyncio.create_task(serving.generate(long, LONG))
            await asyncio.sleep(0)
            await gate.passed()
            assert engine.cache.pages_in_use > pages and len(gate.batches[-1]) == 1  # one pass of its prompt is done
            goes.cancel()
            await asyncio.gather(goes, return_exceptions=True)
            await gate.passed()
            assert engine.cache.pages_in_use == pages
            gate.open()
            await stays

    run(main())
    settled(engine)


def test_a_stream_that_is_left_is_cancelled():
    engine = tiny_engine()

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            async for _ in serving.stream([5, 6], SamplingParams(max_new_tokens=400)):
                break
            gc.collect()
            await asyncio.sleep(0)

    run(main())
    settled(engine)
    assert engine.metrics.snapshot().finished == {"cancelled": 1}


@pytest.fixture
def now(monkeypatch):
    """A clock of the background loop that stands still."""
    now = [100.0]
    monkeypatch.setattr(background_loop, "clock", lambda: now[0])
    return now


def test_a_deadline_ends_the_text_where_it_is(now):
    engine, gate = gated(max_batch_size=2)
    whole = tiny_engine("none").generate([5, 6], LONG).token_ids

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            running = asyncio.create_task(serving.generate([5, 6], LONG, deadline=10))
            await gate.reached()
            streaming = asyncio.create_task(collected(serving.stream([5, 6], LONG, deadline=10)))
            waiting = asyncio.create_task(serving.generate([[7], [8]], LONG, deadline=10))
            patient = asyncio.create_task(serving.generate([9], LONG, deadline=11))
            await asyncio.sleep(0)
            await gate.passed(3)
            now[0] += 10
            await gate.passed()
            output = await running
            assert output.finish_reason == "deadline" and output.token_ids == whole[:4] and output.stats.cycles == 4
            assert await streaming == whole[:3]
            for empty in await waiting:
                assert (empty.finish_reason, empty.token_ids, empty.text, empty.stats.tau) == ("deadline", [], "", 0)
            gate.open()
            assert (await patient).finish_reason == "length"

    run(main())
    settled(engine)
    assert engine.metrics.snapshot().finished == {"deadline": 4, "length": 1}


def test_a_stream_of_several_hears_the_end_of_each_once_whatever_ends_it(now):
    engine, gate = gated()
    short = SamplingParams(max_new_tokens=2)

    async def main() -> list:
        async with AsyncEngine(engine) as serving:
            events = []

            async def listen() -> None:
                async for event in serving.stream([[5], [6], [7]], [short, LONG, LONG], deadline=10):
                    events.append(event)

            listening = asyncio.create_task(listen())
            await gate.reached()
            await gate.passed(4)
            now[0] += 10
            gate.open()
            await listening
            return events

    events = run(main())
    assert {e.index: e.output.finish_reason for e in events if e.output} == {0: "length", 1: "deadline", 2: "deadline"}
    assert sum(event.output is not None for event in events) == 3
    settled(engine)


@pytest.mark.parametrize("drain", [True, False])
def test_closing_finishes_or_drops_what_there_is_and_takes_nothing_new(drain):
    engine, gate = gated(max_batch_size=1)

    async def main() -> None:
        serving = AsyncEngine(engine)
        tasks = [asyncio.create_task(serving.generate([5 + i], GREEDY)) for i in range(2)]
        tasks.append(asyncio.create_task(collected(serving.stream([9], GREEDY))))
        await gate.reached()
        closing = asyncio.create_task(serving.close(drain))
        await asyncio.sleep(0)
        with pytest.raises(Closed, match="the engine is closed"):
            await serving.generate([8], GREEDY)
        gate.open()
        await closing
        found = await asyncio.gather(*tasks, return_exceptions=True)
        if drain:
            assert [len(found[0].token_ids), len(found[1].token_ids), len(found[2])] == [48] * 3
        else:
            assert [type(each) for each in found] == [Closed] * 3 and len(gate.batches) == 1
        await serving.close()  # again

    run(main())
    settled(engine)


def test_an_exception_inside_async_with_drops_the_requests():
    engine, gate = gated()
    left = []

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            left.append(asyncio.create_task(serving.generate([5], SamplingParams(max_new_tokens=1000))))
            await gate.reached()
            gate.open()
            raise KeyError("the service")

    async def both() -> None:
        with pytest.raises(KeyError):
            await main()
        with pytest.raises(Closed):
            await left[0]

    run(both())
    settled(engine)


def test_an_idle_engine_has_no_thread_and_can_be_forgotten():
    engine = tiny_engine()

    async def main() -> weakref.ref:
        serving = AsyncEngine(engine)
        await serving.generate([5], GREEDY)
        thread = serving.loop.thread
        if thread:  # on its way
            await asyncio.to_thread(thread.join, 30)
        assert serving.loop.thread is None
        assert (await serving.generate([5], GREEDY)).token_ids
        return weakref.ref(serving)

    forgotten = run(main())
    gc.collect()
    assert forgotten() is None
