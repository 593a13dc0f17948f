"""A rank that ends or hangs, at any moment, ends the request with an error in time, and leaves no process behind."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
import time

import psutil
import pytest

from specengine import AsyncEngine, Engine, GenerationFailed, RankFailed, SamplingParams
from specengine.parallel import group
from specengine.parallel.connection import Start
from tests.engines import ids, tiny_model
from tests.parallel.odd import odd_folder

LONG = SamplingParams(max_new_tokens=120, temperature=0.8, seed=5, ignore_eos=True)
PROMPTS = [[5, 9, 13], [*range(3, 200)]]
SOON = 10.0  # seconds; a dead rank is seen at once, but the machine may be busy


def ranks() -> list[psutil.Process]:
    """Processes that serve as ranks of this one's engines."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if any("specengine.parallel.worker" in argument for argument in child.cmdline()):
                found.append(child)
    return found


@pytest.fixture
def others():
    """Ranks of other engines, whose tests are not over."""
    return {child.pid for child in ranks()}


def own(others) -> list[psutil.Process]:
    return [child for child in ranks() if child.pid not in others]


def engine(size=2, **options):
    return Engine(
        "random:tiny-llama", drafter="prompt_lookup,adaptive=false", device="cpu", tensor_parallel=size, **options
    )


def check_over(failed, others):
    assert not failed.healthy and not own(others)
    begin = time.monotonic()
    with pytest.raises(RankFailed, match="make a new engine"):
        failed.generate([7], LONG)
    assert time.monotonic() - begin < SOON


def test_a_killed_rank_ends_the_request_and_the_engine(others):
    failing = engine(max_batch_size=2)
    (rank,) = own(others)
    events = failing.stream([5, 6], LONG)
    next(events)
    rank.kill()
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=rf"^tensor_parallel: rank 1 \(process {rank.pid}\) was ended by signal 9$"):
        for _ in events:
            pass
    assert time.monotonic() - begin < SOON
    check_over(failing, others)
    assert failing.metrics.snapshot().running == 0 and failing.cache.pages_in_use == 0


def test_a_rank_killed_between_requests_is_seen_without_one(others):
    failing = engine()
    first = failing.generate([5, 6], SamplingParams(max_new_tokens=4))
    assert failing.healthy and len(first.token_ids) == 4
    (rank,) = own(others)
    rank.kill()
    begin = time.monotonic()
    while failing.healthy:
        assert time.monotonic() - begin < SOON
    with pytest.raises(RankFailed):
        failing.generate([5, 6], LONG)
    check_over(failing, others)


def test_one_of_three_ranks_is_enough(others, tmp_path):
    failing = Engine(odd_folder(tmp_path), drafter="none", device="cpu", tensor_parallel=3)
    last = own(others)[-1]
    events = failing.stream([5, 6], LONG)
    next(events)
    last.kill()
    with pytest.raises(RankFailed, match=rf"process {last.pid}\) was ended by signal 9"):
        for _ in events:
            pass
    check_over(failing, others)


def test_a_hung_rank_ends_the_request_in_the_stated_time(others, monkeypatch):
    assert group.PATIENCE == 30
    monkeypatch.setattr(group, "PATIENCE", 2.0)
    failing = engine()
    (rank,) = own(others)
    events = failing.stream([5, 6], LONG)
    next(events)
    rank.suspend()
    begin = time.monotonic()
    with pytest.raises(RankFailed, match="did not answer within 2 s"):
        for _ in events:
            pass
    assert 1 < time.monotonic() - begin < 2 + SOON
    check_over(failing, others)


def test_a_rank_that_hangs_while_it_is_told_much_ends_the_request_too(others, monkeypatch):
    monkeypatch.setattr(group, "PATIENCE", 1.0)
    failing = engine()
    (rank,) = own(others)
    rank.suspend()
    ranks_of = failing.model.target._group._ranks
    with pytest.raises(RankFailed, match="did not answer within 1 s"), failing.model.target._group._failing():
        for _ in range(100):  # more than the socket holds
            ranks_of.tell(b" " * (1 << 20))
    check_over(failing, others)


def test_an_error_in_a_rank_is_told_by_the_first_one(others):
    failing = engine()
    with pytest.raises(
        RankFailed, match=r"rank 1 \(process \d+\) ended with status 1: TypeError: message: str is none"
    ):
        for _ in range(100):
            with failing.model.target._group.together("nonsense"):
                time.sleep(0.1)
    check_over(failing, others)


def test_an_error_or_an_interrupt_in_the_first_rank_s_own_part_ends_the_group(others, monkeypatch):
    monkeypatch.setattr(group, "_ENDING", 0.1)
    for error, raised in ((ValueError("planted"), RankFailed), (KeyboardInterrupt(), KeyboardInterrupt)):
        failing = engine()

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(failing.model.target._group._ranks, "gather", fail)
        with pytest.raises(raised) as caught:
            failing.generate([5, 6], LONG)
        assert raised is KeyboardInterrupt or "rank 0 failed: ValueError: planted" in str(caught.value)
        check_over(failing, others)


def test_a_model_that_only_the_others_cannot_read_is_an_error_at_once(others, monkeypatch):
    monkeypatch.setattr(group, "Start", lambda rank, size, path, *rest: Start(rank, size, "/nowhere", *rest))
    with pytest.raises(RankFailed, match=r"rank 1 .* ended with status 1: FileNotFoundError: /nowhere"):
        engine()
    assert not own(others)


def test_requests_of_an_async_engine_fail_and_later_ones_too(others):
    failing = engine(max_batch_size=1)
    (rank,) = own(others)

    async def main():
        async with AsyncEngine(failing) as serving:
            calls = [asyncio.create_task(serving.generate(prompt, LONG)) for prompt in PROMPTS]
            while not failing.metrics.snapshot().generated_tokens:
                await asyncio.sleep(0.01)
            rank.kill()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, GenerationFailed) and isinstance(outcome.__cause__, RankFailed)
            assert not failing.healthy
            with pytest.raises(GenerationFailed, match="make a new engine"):
                await serving.generate([7], LONG)

    asyncio.run(main())
    check_over(failing, others)


def test_ranks_end_when_the_first_one_is_killed():
    program = (
        "import psutil; from specengine import Engine, SamplingParams; "
        "e = Engine('random:tiny-llama', drafter='none', device='cpu', tensor_parallel=2); "
        "print(*[c.pid for c in psutil.Process().children()], flush=True); "
        "[e.generate([5], SamplingParams(max_new_tokens=400, ignore_eos=True)) for _ in range(1000)]"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True)
    (rank,) = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
    time.sleep(random.random() / 2)
    process.kill()
    process.wait()
    assert not psutil.wait_procs([rank], timeout=SOON)[1]


def test_a_fork_leaves_the_ranks_alone(others):
    kept = engine()
    child = os.fork()
    if not child:
        try:
            kept.generate([7], LONG)
        except RankFailed as error:
            os._exit(0 if "not to a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert kept.healthy and len(own(others)) == 1
    assert kept.generate([7], LONG).token_ids == Engine(tiny_model(), drafter="none").generate([7], LONG).token_ids


def killed_at_random(rounds, seed, others):
    """Kills in the midst of generating and of loading by turns; says when they came."""
    draw, plain = random.Random(seed), ids(Engine(tiny_model(), drafter="none").generate(PROMPTS, LONG))
    begin = time.monotonic()
    usual = engine()
    loading = time.monotonic() - begin
    usual.generate(PROMPTS, LONG)
    generating = time.monotonic() - begin - loading
    del usual
    came = {"loading": 0, "generating": 0, "later": 0}
    for number in range(rounds):
        killer, started, when = Killer(others), None, "loading"
        if number % 2:
            killer.after(draw.random() * loading)
        try:
            started, when = engine(), "generating"
            if not number % 2:
                killer.after(draw.random() * generating)
            assert ids(started.generate(PROMPTS, LONG)) == plain
            when = "later"
        except RankFailed as error:
            assert "was ended by signal 9" in str(error)
        took = killer.seconds_since()
        assert took < SOON, f"{when}: the error came {took:.1f} s after the kill"
        came[when] += 1
        killer.join()
        if started is not None:
            check_over(started, others)
        assert not own(others)
    return came


class Killer:
    """Kills the rank of the engine that is being made, some seconds from now, or as soon as it is there."""

    def __init__(self, others):
        self.others, self.killed = others, None

    def after(self, seconds):
        self.thread = threading.Thread(target=self._run, args=(time.monotonic() + seconds,))
        self.thread.start()

    def _run(self, due):
        while not (found := own(self.others)) or time.monotonic() < due:
            time.sleep(0.001)
        self.killed = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            found[0].kill()  # and no wait: how it ended is for the engine to learn

    def seconds_since(self):
        return time.monotonic() - self.killed if self.killed else 0.0

    def join(self):
        self.thread.join()


def test_kills_at_random_points_end_cleanly(others):
    killed_at_random(2, time.time_ns(), others)


@pytest.mark.slow
def test_fifty_kills_at_random_points_end_cleanly(others):
    came = killed_at_random(50, 1, others)
    print(came)
    assert came["loading"] and came["generating"]
