"""In the child of a fork, what needs the threads of the parent's model raises an error that names the remedy."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable

import pytest

from specengine import AsyncEngine, Engine, SamplingParams
from specengine.tensor_parallel.loading import load_model
from specengine.utils import forks
from tests.engines import tiny_engine, tiny_model

PARAMS = SamplingParams(max_new_tokens=4)
# The test forks a process that has threads.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def in_a_fork(call: Callable[[], object]) -> str:
    """What the call raises in the child of a fork; a hang ends the child, and the text is empty."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            call()
        except BaseException as error:
            os.write(write, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def test_every_way_to_a_text_is_refused_at_once():
    engine = tiny_engine()
    constrained = SamplingParams(max_new_tokens=4, temperature=1.0)
    stream = engine.stream([5, 9], PARAMS)
    next(stream)
    calls = [
        lambda: engine.generate([5, 9], PARAMS),
        lambda: engine.generate([[5, 9], [7] * 300], constrained),
        lambda: engine.stream([5, 9], PARAMS),
        lambda: next(stream),
        lambda: asyncio.run(AsyncEngine(engine).generate([5, 9], PARAMS)),
        lambda: Engine(tiny_model()),
        lambda: load_model("random:tiny-llama", device="cpu"),
        lambda: in_a_fork(lambda: None) or engine.generate([5], PARAMS),
    ]
    for number, call in enumerate(calls):
        found = in_a_fork(call)
        assert found.startswith("RuntimeError: ") and "spawn" in found and "load the model" in found, (number, found)
    assert sum(len(event.token_ids) for event in stream) and engine.generate([5, 9], PARAMS)


@pytest.mark.full
def test_a_pool_of_forks_reports_the_error_of_the_default_model(smollm2_path):
    engine = Engine(load_model(smollm2_path, device="cpu"), drafter="none")
    global texts

    def texts(prompt: str) -> str:
        return engine.generate(prompt, PARAMS).text

    with multiprocessing.get_context("fork").Pool(2) as pool, pytest.raises(RuntimeError, match="spawn"):
        pool.map_async(texts, ["Once", "The"]).get(timeout=60)


def test_without_a_loaded_model_in_the_parent_a_fork_works(monkeypatch):
    engine = tiny_engine("none")
    monkeypatch.setattr(forks, "_loaded", False)
    expected = engine.generate([5], PARAMS).token_ids
    assert in_a_fork(lambda: sys.exit(str(engine.generate([5], PARAMS).token_ids))) == f"SystemExit: {expected}"
