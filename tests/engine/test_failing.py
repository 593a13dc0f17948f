"""An exception ends only the requests of the failing step, and no request hangs."""

import asyncio
import logging
from functools import partial

import pytest

from specengine import AsyncEngine, GenerationFailed
from specengine.engine.background_loop import Submission
from specengine.engine.batch import Batch
from specengine.engine.scheduler import Scheduler
from tests.engine.gated import collected, gated, run, settled
from tests.engines import GREEDY, tiny_engine


def test_a_failing_cycle_fails_those_in_it_and_no_others(caplog, capsys, monkeypatch):
    engine, gate = gated(max_batch_size=2)
    expected = tiny_engine("none").generate([7], GREEDY).token_ids

    def close(batch) -> None:  # on a device that would commit what is under way
        assert all(s.finish_reason != "error" for s in batch.requests)

    monkeypatch.setattr(Batch, "close", close)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            fail = [asyncio.create_task(serving.generate([5], GREEDY))]
            await gate.reached()
            fail.append(asyncio.create_task(collected(serving.stream([6], GREEDY))))
            queued = asyncio.create_task(serving.generate([7], GREEDY))
            await asyncio.sleep(0)
            await gate.passed()
            gate.failure = RuntimeError("planted")
            gate.open()
            for failure in await asyncio.gather(*fail, return_exceptions=True):
                assert type(failure) is GenerationFailed and str(failure) == "RuntimeError: planted"
                assert isinstance(failure.__cause__, RuntimeError)
            assert (await queued).token_ids == expected
            assert (await serving.generate([7], GREEDY)).token_ids == expected

    with caplog.at_level(logging.INFO, logger="specengine"):
        run(main())
    settled(engine)
    assert engine.metrics.snapshot().finished == {"error": 2, "length": 2}
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    assert {record.name for record in caplog.records} == {"specengine"}
    assert capsys.readouterr().out == ""


def test_the_other_samples_of_a_failed_request_end_with_it():
    engine, gate = gated(max_batch_size=1)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            several = asyncio.create_task(serving.generate([[5], [6]], GREEDY))
            await gate.reached()
            gate.failure = RuntimeError("planted")
            gate.open()
            with pytest.raises(GenerationFailed):
                await several

    run(main())
    settled(engine)
    assert gate.batches == [[(5,)]]


def test_a_prompt_that_fails_fails_alone(monkeypatch):
    engine, gate = gated()
    allocate = engine.cache.allocate_with_prefix

    def no_room(slots, *rest):
        if slots > 300:
            raise MemoryError("planted")
        return allocate(slots, *rest)

    monkeypatch.setattr(engine.cache, "allocate_with_prefix", no_room)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            stays = asyncio.create_task(serving.generate([5], GREEDY))
            await gate.reached()
            large = asyncio.create_task(serving.generate([3] * 440, GREEDY))
            await asyncio.sleep(0)
            gate.open()
            with pytest.raises(GenerationFailed, match="MemoryError: planted"):
                await large
            assert len((await stays).token_ids) == 48

    run(main())
    settled(engine)


def test_a_failure_of_the_worker_itself_reaches_everybody(monkeypatch):
    engine, gate = gated(max_batch_size=1)
    add = Scheduler.add

    def planted(scheduler, requests):
        if any(request.tokens == [7] for request in requests):
            raise SystemError("planted")
        add(scheduler, requests)

    monkeypatch.setattr(Scheduler, "add", planted)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            tasks = [asyncio.create_task(serving.generate([5 + i], GREEDY)) for i in range(2)]
            await gate.reached()
            tasks += [asyncio.create_task(collected(serving.stream([7 + i], GREEDY))) for i in range(2)]
            await asyncio.sleep(0)
            gate.open()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [str(each) for each in found] == ["SystemError: planted"] * 4
            assert len((await serving.generate([5], GREEDY)).token_ids) == 48  # and it goes on

    run(main())
    settled(engine)


def test_an_event_loop_that_is_gone_takes_only_its_own_requests_along():
    engine, gate = gated()
    serving, loop = AsyncEngine(engine), asyncio.new_event_loop()
    loop.close()
    tell = partial(loop.call_soon_threadsafe, print)
    serving.loop.submit(Submission(engine.prepare([5], GREEDY).requests, tell, streams=True))

    async def main() -> None:
        await gate.reached()
        other = asyncio.create_task(serving.generate([6], GREEDY))
        await asyncio.sleep(0)
        gate.open()
        assert len((await other).token_ids) == 48
        await serving.close()

    run(main())
    settled(engine)
    assert engine.metrics.snapshot().finished == {"cancelled": 1, "length": 1}
    assert gate.batches[:3] == [[(5,)], [(6,)], [(6,)]]
