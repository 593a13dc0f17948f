"""A rank that ends or hangs at any moment ends the request with an error in time; no process stays behind."""

import asyncio
import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from specengine import _C, AsyncEngine, Engine, GenerationFailed, RankFailed, SamplingParams
from specengine.tensor_parallel import group, rank_processes
from specengine.tensor_parallel.messages import Ready, Start, encode_message
from tests.engines import ids, tiny_model
from tests.tensor_parallel.kills import SOON, check_over, kills, own, ranks

LONG = SamplingParams(max_new_tokens=120, temperature=0.8, seed=5, ignore_eos=True)
PROMPTS = [[5, 9, 13], [*range(3, 200)]]


@pytest.fixture
def others():
    """Ranks of the engines of other tests."""
    return {child.pid for child in ranks()}


@pytest.fixture
def deaf(monkeypatch):
    """Ranks that report ready and then neither send nor receive. They start at once: they load nothing."""
    begin = "import socket, sys, time; end = socket.socket(fileno=int(sys.argv[2]))"
    ready = encode_message(Ready())
    command = f"{begin}; end.send({ready!r}); time.sleep(600)  # not specengine.tensor_parallel.worker"
    monkeypatch.setattr(rank_processes, "_COMMAND", command)


def engine(size=2, **options):
    return Engine(
        "random:tiny-llama", drafter="prompt_lookup,adaptive=false", device="cpu", tensor_parallel=size, **options
    )


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


def test_a_rank_killed_between_requests_is_seen_without_one(others, deaf):
    failing = engine()
    assert failing.healthy
    (rank,) = own(others)
    rank.kill()
    check_over(failing, others)


def test_a_hung_rank_ends_the_request_in_the_stated_time(others, deaf, monkeypatch):
    assert group.ANSWER_SECONDS == 30
    monkeypatch.setattr(group, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(rank_processes, "_ENDING_SECONDS", 0.1)
    failing = engine()
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"did not answer within 0\.5 s"):
        failing.generate([5, 6], LONG)
    assert 0.4 < time.monotonic() - begin < 1 + SOON
    check_over(failing, others)


def test_a_rank_that_hangs_while_a_long_message_is_sent_ends_the_request_too(others, deaf, monkeypatch):
    monkeypatch.setattr(group, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(rank_processes, "_ENDING_SECONDS", 0.1)
    failing = engine()
    sharing = failing.model.target._group
    with pytest.raises(RankFailed, match=r"did not answer within 0\.5 s"), sharing._closing_on_error():
        for _ in range(100):  # more than the socket holds
            sharing._ranks.send(b" " * (1 << 20))
    check_over(failing, others)


@pytest.mark.full
def test_an_error_in_a_rank_is_raised_by_the_first_one(others):
    failing = engine()
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) failed: TypeError: message: str is no message"):
        for _ in range(100):
            with failing.model.target._group.broadcast("nonsense"):
                time.sleep(0.1)
    check_over(failing, others)


def test_an_error_or_an_interrupt_in_the_first_rank_s_own_part_ends_the_group(others, deaf, monkeypatch):
    monkeypatch.setattr(rank_processes, "_ENDING_SECONDS", 0.1)
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
    monkeypatch.setattr(rank_processes, "Start", lambda rank, size, path, *rest: Start(rank, size, "/nowhere", *rest))
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) failed: FileNotFoundError: /nowhere"):
        engine()
    assert not own(others)


def test_requests_of_an_async_engine_fail_and_later_ones_too(others, deaf):
    failing = engine(max_batch_size=1)
    (rank,) = own(others)

    async def main():
        async with AsyncEngine(failing) as serving:
            calls = [asyncio.create_task(serving.generate(prompt, LONG)) for prompt in PROMPTS]
            while not failing.metrics.snapshot().running:
                await asyncio.sleep(0.01)
            rank.kill()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, GenerationFailed) and isinstance(outcome.__cause__, RankFailed)
            assert not failing.healthy
            with pytest.raises(GenerationFailed, match="make a new engine"):
                await serving.generate([7], LONG)

    asyncio.run(main())
    check_over(failing, others)


@pytest.mark.full
def test_ranks_end_when_the_first_one_is_killed_though_a_fork_of_it_lives():
    first = (  # as a rank sees the first one
        "import os, socket, subprocess, sys, time; ours, theirs = socket.socketpair(); "
        "command, places, start = sys.argv[1:]; words = [places, str(theirs.fileno()), str(os.getpid())]; "
        "rank = subprocess.Popen([sys.executable, '-I', '-c', command, *words], pass_fds=[theirs.fileno()]); "
        "ours.sendall(bytes.fromhex(start)); ours.recv(1); "  # it is ready
        "fork = os.fork() or time.sleep(600) or os._exit(0); "  # it has the sockets, too
        "print(fork, rank.pid, flush=True); time.sleep(600)"
    )
    start = encode_message(Start(1, 2, "random:tiny-llama", "float32", _C.instruction_set(), "cpu", True)).hex()
    words = [sys.executable, "-c", first, rank_processes._COMMAND, json.dumps(sys.path), start]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    fork, rank = (psutil.Process(int(pid)) for pid in process.stdout.readline().split())
    process.kill()
    process.wait()
    try:
        assert not psutil.wait_procs([rank], timeout=SOON)[1] and fork.is_running()
    finally:
        fork.kill()


@pytest.mark.full
def test_a_fork_leaves_the_ranks_alone_which_take_no_module_of_the_working_directory(others, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not ours')")
    monkeypatch.chdir(tmp_path)
    kept = engine()
    child = os.fork()
    if not child:
        try:
            kept.generate([7], LONG)
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert kept.healthy and len(own(others)) == 1
    assert kept.generate([7], LONG).token_ids == Engine(tiny_model(), drafter="none").generate([7], LONG).token_ids


@pytest.mark.full
def test_kills_at_random_points_end_cleanly():
    """Two kills; bench/rank_kills.py runs many."""
    expected = ids(Engine(tiny_model(), drafter="none").generate(PROMPTS, LONG))
    assert len([*kills(engine, PROMPTS, LONG, expected, rounds=2, seed=time.time_ns())]) == 2
