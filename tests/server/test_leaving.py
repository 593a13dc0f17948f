"""Clients that disconnect, texts that reach the deadline, servers that shut down."""

import concurrent.futures
import contextlib
import json
import signal
import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest

from specengine.engine.cycle import Cycle
from specengine.server.command import open_listener
from tests.server import servers
from tests.server.servers import LONG, chat, chat_folder, command, metrics, served, settled, streaming, total, until


def lines(response: httpx.Response) -> list[dict]:
    data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_a_stream_frees_its_place_and_its_pages(slow, n):
    stop = threading.Event()
    with served() as address:
        threads = [streaming(address, LONG | {"n": n}, stop) for _ in range(3)]
        assert total(address, "requests_running") == 3 * n and total(address, "cache_pages_used") > 0
        stop.set()
        for thread in threads:
            thread.join()
        settled(address)
        finished = metrics(address)["specengine_requests_finished_total"].samples
        assert finished == {("", (("reason", "cancelled"), *LABELS)): 3 * n}


LABELS = (("drafter", "prompt_lookup,adaptive=false"), ("rule", "match"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_it_hears_anything_is_noticed(slow, stream):
    stop = threading.Event()
    with served(max_batch_size=1) as address:
        first = streaming(address, LONG, stop)
        host = urlsplit(address)
        with socket.create_connection((host.hostname, host.port)) as connection:
            body = json.dumps(LONG | {"stream": stream}).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: total(address, "requests_waiting") == 1)
        until(lambda: total(address, "requests_waiting") == 0)
        assert total(address, "requests_running") == 1
        stop.set()
        first.join()
        settled(address)


def test_a_client_that_does_not_read_is_cut_off_in_the_end(monkeypatch):
    from specengine.server import handler

    stream = handler.EventStream
    monkeypatch.setattr(handler, "EventStream", lambda values, source, seconds: stream(values, source, 1.0))
    body = json.dumps(LONG | {"n": 100, "speculation": {"tokens": True, "stats": True}}).encode()
    with served() as address:
        host = urlsplit(address)
        with socket.create_connection((host.hostname, host.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: total(address, "http_requests_running") == 1)
            settled(address)


def test_a_deadline_ends_a_text_where_it_is(slow):
    with served(deadline=0.5) as address:
        ask = LONG | {"speculation": {"stats": True}, "n": 2}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=ask, timeout=30) as response:
            last = [choice for chunk in lines(response) for choice in chunk["choices"] if choice["finish_reason"]]
        assert [choice["finish_reason"] for choice in last] == ["length"] * 2
        stats = last[0]["speculation"]["stats"]
        assert stats["ended"] == "deadline" and 0 < stats["tokens"] < 300
        whole = chat(address, LONG | {"stream": False}).json()
        assert whole["choices"][0]["finish_reason"] == "length" and 0 < whole["usage"]["completion_tokens"] < 300


@pytest.mark.parametrize("when", [0, 5])
def test_a_pass_that_fails_is_an_error_of_its_requests_alone(monkeypatch, when):
    cycle, failing = Cycle.run, [False]

    def sometimes(self, batch):
        if failing[0] and all(len(s.tokens) - s.prompt_length >= when for s in batch.requests):
            failing[0] = False
            raise RuntimeError("the planted failure")
        return cycle(self, batch)

    monkeypatch.setattr(Cycle, "run", sometimes)
    with served() as address:
        for stream in (False, True):
            failing[0] = True
            response = chat(address, LONG | {"stream": stream})
            if stream and when:  # the status was sent before the failure
                assert response.status_code == 200
                error = lines(response)[-1]["error"]
            else:
                assert response.status_code == 500
                error = response.json()["error"]
            assert error["type"] == "server_error" and "planted" not in error["message"]
            assert chat(address).status_code == 200
        settled(address)


@pytest.mark.full
def test_a_server_that_is_told_to_end_finishes_what_it_has_and_takes_nothing_new():
    ask = LONG | {"n": 2, "max_tokens": 400}  # all fit in one batch
    with command("--model", str(chat_folder()), "--drafter", "none", "--device", "cpu") as (address, process):
        begun = threading.Barrier(4)

        def listen(number: int) -> int:
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=ask | {"seed": number}, timeout=60) as got:
                assert got.status_code == 200
                stream = got.iter_lines()
                next(stream)
                begun.wait(30)
                data = [json.loads(line[6:]) for line in stream if line.startswith("data: {")]
                return sum(choice["finish_reason"] == "length" for chunk in data for choice in chunk["choices"])

        with concurrent.futures.ThreadPoolExecutor() as pool:
            whole = pool.submit(chat, address, ask | {"stream": False})
            until(lambda: total(address, "http_requests_running") == 1 or whole.done())
            finished = [pool.submit(listen, number) for number in range(3)]
            begun.wait(30)
            process.send_signal(signal.SIGTERM)
            assert [future.result() for future in finished] == [2] * 3
            answer = whole.result()
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 2 * 400
        assert process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


def test_what_takes_longer_than_the_drain_is_dropped_without_a_traceback(slow, caplog, monkeypatch):
    """A stream, a whole answer, and a stream whose client does not read."""
    heard: list[str] = []
    begun = threading.Event()
    whole = LONG | {"stream": False}

    @contextlib.contextmanager
    def small_buffers(*address):
        with open_listener(*address) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # its connections inherit it
            yield listener

    monkeypatch.setattr(servers, "open_listener", small_buffers)

    def listen(address: str) -> None:
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=LONG | {"n": 60}, timeout=30) as response:
            try:
                for line in response.iter_lines():
                    begun.set()
                    heard.append(line)
            except httpx.TransportError:
                heard.append("cut")

    with contextlib.ExitStack() as clients, served(drain=0.5) as address:
        thread = threading.Thread(target=listen, args=(address,))
        thread.start()
        assert begun.wait(30)
        host = urlsplit(address)
        for body in (whole, LONG | {"n": 100, "speculation": {"tokens": True}}):
            deaf = clients.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host.hostname, host.port))
            text = json.dumps(body).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            deaf.sendall(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        until(lambda: total(address, "http_requests_running") == 3)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    thread.join(30)
    assert not thread.is_alive() and heard[-1] == "cut"
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
