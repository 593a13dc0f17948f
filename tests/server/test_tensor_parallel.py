"""A server with several processes returns the texts of one process, and reports a failed process."""

import json
import signal
import time

import httpx
import pytest

from specengine import SamplingParams
from specengine.server.settings import DRAFTERS
from specengine.tensor_parallel import group
from specengine.tensor_parallel.loading import load_model
from tests.server.commands import run
from tests.server.servers import ASK, HELLO, LONG, chat, chat_folder, command, plain_engine, problem, served, until
from tests.tensor_parallel.kills import SOON, own, ranks


@pytest.mark.full
def test_a_killed_rank_ends_texts_with_an_error_and_the_server_says_that_it_is_not_well():
    options = ["--drafter", "none", "--device", "cpu", "--tensor-parallel", "2"]
    with command("--model", str(chat_folder()), *options) as (address, process):
        ask = LONG | {"temperature": 0, "max_tokens": 20, "stream": False}
        expected = plain_engine().generate(HELLO, SamplingParams(max_new_tokens=20, ignore_eos=True))
        assert chat(address, ask).json()["choices"][0]["message"]["content"] == expected.text
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}

        (rank,) = ranks(process.pid)
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=LONG | {"n": 8}, timeout=SOON) as response:
            lines = response.iter_lines()
            next(lines)
            rank.kill()
            killed = time.monotonic()
            *_, last, done = [line.removeprefix("data: ") for line in lines if line]
        error = json.loads(last)["error"]
        assert (error["type"], error["code"]) == ("server_error", "failed") and done == "[DONE]"

        until(lambda: httpx.get(f"{address}/health").status_code == 503, SOON)
        assert time.monotonic() - killed < SOON
        why = f"rank 1 (process {rank.pid}) was ended by signal 9"
        assert httpx.get(f"{address}/health").json() == {"status": "failed", "why": why}
        for stream in (False, True):
            response = chat(address, LONG | {"stream": stream})
            assert response.status_code == 503 and problem(response)["code"] == "failed"
        assert httpx.get(f"{address}/metrics").status_code == httpx.get(f"{address}/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "ERROR a request failed: " in process.stderr.read()


@pytest.mark.full
def test_a_hung_rank_ends_texts_with_an_error_and_the_server_says_that_it_is_not_well(monkeypatch):
    monkeypatch.setattr(group, "ANSWER_SECONDS", 1.0)
    others = {child.pid for child in ranks()}
    model = load_model(chat_folder(), device="cpu", tensor_parallel=2)
    (rank,) = own(others)
    with served(model, drafters=("none", *DRAFTERS)) as address:
        assert chat(address, ASK).status_code == 200
        rank.suspend()
        began = time.monotonic()
        response = chat(address, ASK)
        assert response.status_code == 500 and problem(response)["code"] == "failed"
        assert time.monotonic() - began < 1 + SOON
        health = httpx.get(f"{address}/health")
        assert (
            health.status_code == 503
            and health.json()["why"] == f"rank 1 (process {rank.pid}) did not answer within 1 s"
        )
        response = chat(address, ASK)
        assert response.status_code == 503 and problem(response)["code"] == "failed"


@pytest.mark.parametrize("number", ["0", "3"])  # the tiny model has two key/value heads
def test_a_number_that_cannot_be_is_one_line(number):
    result = run("--port", "0", "--device", "cpu", "--tensor-parallel", number)
    assert result.exit_code == 2 and "tensor_parallel: " in result.output and result.output.count("\n") == 1


def test_a_process_that_fails_at_the_start_is_one_line(monkeypatch):
    monkeypatch.setattr("specengine.tensor_parallel.rank_processes._COMMAND", "raise SystemExit(3)")
    result = run("--port", "0", "--device", "cpu", "--tensor-parallel", "2")
    assert result.exit_code == 1 and "ended with status 3" in result.output and result.output.count("\n") == 1
