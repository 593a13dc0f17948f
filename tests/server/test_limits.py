"""The limits of requests: host, key, media type, size and free slots; and the responses under overload."""

import asyncio
import socket
import threading
from urllib.parse import urlsplit

import httpx
import pytest

from specengine.server import limits
from specengine.server.app import make_app
from specengine.server.engine_pool import EnginePool
from specengine.server.settings import Settings
from tests.server.servers import (
    ASK,
    LONG,
    SETTINGS,
    chat,
    chat_model,
    metrics,
    problem,
    served,
    settled,
    streaming,
    total,
    until,
)


@pytest.fixture(scope="module")
def address():
    with served(max_body_bytes=2000, max_prompt_tokens=100) as address:
        yield address


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", None),
        (b"", None),
        (b"[1, 2]", None),
        (b"null", None),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "half \\ud83d of a pair"}]}', "messages"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stop": "\\ud83d"}', "stop"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "top_p": Infinity}', "top_p"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": NaN}}', "logit_bias"),
        (b'{"model": "tiny", "messages": ' + b"[" * 900 + b"]" * 900 + b"}", None),
        (b'{"model": "\\ud83d", "messages": [{"role": "user", "content": "x"}]}', "model"),
        (b'{"model": "tiny", "\\ud83d": 1, "messages": [{"role": "user", "content": "x"}]}', None),
        (b'{"model": "tiny", "seed": ' + b"9" * 1500 + b', "messages": [{"role": "user", "content": "x"}]}', "seed"),
        ('{"model": "tiny", "messages": "\xe4"}'.encode("latin-1"), None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_of_any_kind_get_an_answer(address, body, field):
    response = chat(address, body)
    assert response.status_code == (404 if field == "model" else 400)
    error = problem(response)
    if field:
        assert error["param"] == field
    assert error["message"]


def test_a_large_body_is_refused_before_it_is_read(address):
    assert chat(address, b"x" * 2001).status_code == 413
    host = urlsplit(address)
    with socket.create_connection((host.hostname, host.port), timeout=30) as connection:  # without a content length
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        connection.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")


def test_the_head_of_a_request_is_bounded(address):
    host = urlsplit(address)
    with socket.create_connection((host.hostname, host.port), timeout=30) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 16))
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")


def test_a_long_prompt_is_refused(address):
    error = problem(chat(address, {"model": "tiny", "prompt": "x" * 101}, "/v1/completions"))
    assert (
        error["param"] == "prompt" and error["code"] == "context_length_exceeded" and "at most 100" in error["message"]
    )


def test_a_body_that_does_not_come_is_not_waited_for(address, monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.1)
    host = urlsplit(address)
    with socket.create_connection((host.hostname, host.port), timeout=30) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    settled(address)


def test_other_types_other_methods_and_other_places_are_refused(address):
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        assert chat(address, headers={"content-type": kind}).status_code == 415
    assert chat(address, headers={"content-type": "application/json; charset=utf-8"}).status_code == 200
    for method, path in (("GET", "/v1/completions"), ("DELETE", "/v1/models")):
        response = httpx.request(method, address + path)
        assert response.status_code == 405 and problem(response)["message"]
    for path in ("/v1/embeddings", "/docs", "/openapi.json", "/redoc", "/../etc/passwd"):
        response = httpx.get(address + path)
        assert response.status_code == 404 and problem(response)["message"]


def test_health_needs_nothing_and_responses_are_counted(address):
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    responses = metrics(address)["specengine_http_responses_total"].samples
    assert responses["", (("path", "/health"), ("status", "200"))] >= 1
    httpx.get(f"{address}/nowhere/else")
    responses = metrics(address)["specengine_http_responses_total"].samples
    assert responses["", (("path", "other"), ("status", "404"))] >= 1


def test_a_page_elsewhere_whose_name_means_this_machine_is_refused(address):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1].evil", "10.0.0.1"):
        assert httpx.get(f"{address}/health", headers={"host": host}).status_code == 403
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert httpx.get(f"{address}/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("settings", "known", "unknown"),
    [
        ({"host": "0.0.0.0"}, ["any.example", "10.0.0.1:80"], []),
        (
            {"host": "0.0.0.0", "hosts": ("llm.example",)},
            ["llm.example:80", "10.0.0.1", "[fe80::1]"],
            ["other.example"],
        ),
        ({"hosts": ("llm.example",)}, ["llm.example", "localhost"], ["other.example", "10.0.0.1"]),
    ],
)
def test_names_of_the_server_can_be_given(settings, known, unknown):
    chosen = Settings(**SETTINGS | settings)
    assert all(map(chosen.accepts_host, known)) and not any(map(chosen.accepts_host, unknown))


def test_a_key_is_asked_for_where_there_is_one():
    assert "secret-1" not in repr(Settings(**SETTINGS, api_key="secret-1"))
    with served(api_key="secret-1") as address:
        right = {"authorization": "Bearer secret-1"}
        for headers in ({}, {"authorization": "Bearer secret-2"}, {"authorization": "secret-1"}):
            for path in ("/v1/models", "/metrics"):
                response = httpx.get(address + path, headers=headers)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
                assert problem(response)["code"] == "invalid_api_key" and "secret" not in response.text
            assert chat(address, headers=headers).status_code == 401
        assert httpx.get(f"{address}/v1/models", headers=right).status_code == 200
        assert httpx.get(f"{address}/metrics", headers=right).status_code == 200
        assert chat(address, headers=right).status_code == 200
        assert httpx.get(f"{address}/health").status_code == httpx.get(f"{address}/").status_code == 200
        latin = httpx.get(f"{address}/v1/models", headers={"authorization": "Bearer \xe4".encode("latin-1")})
        assert latin.status_code == 401


def test_a_key_is_asked_for_below_a_path_of_others_too():
    """Ray passes requests in this form to an application with a route_prefix."""
    settings = Settings(**SETTINGS, api_key="secret-1")
    pool = EnginePool(chat_model(), settings)
    below = httpx.ASGITransport(make_app(pool, settings), root_path="/llm")

    async def statuses(headers) -> list[int]:
        async with httpx.AsyncClient(transport=below, base_url="http://127.0.0.1", headers=headers) as client:
            return [
                (await client.get(f"/llm{path}")).status_code for path in ("/v1/models", "/metrics", "/health", "/")
            ]

    async def both() -> None:
        assert await statuses({}) == [401, 401, 200, 200]
        assert await statuses({"authorization": "Bearer secret-1"}) == [200] * 4
        await pool.close()

    asyncio.run(both())


def test_more_requests_than_places_get_429_and_a_time_to_come_again(slow):
    stop = threading.Event()
    with served(max_streams=2) as address:
        threads = [streaming(address, LONG, stop) for _ in range(2)]
        response = chat(address)
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert problem(response)["type"] == "rate_limit_error"
        assert httpx.get(f"{address}/health").status_code == 200
        stop.set()
        for thread in threads:
            thread.join()
        settled(address)
        assert chat(address).status_code == 200


def test_a_full_queue_gets_503_and_loses_nothing_that_was_taken(slow):
    stop = threading.Event()
    with served(max_batch_size=1, max_waiting=2) as address:
        first = streaming(address, LONG, stop)
        results: list[httpx.Response] = []
        waiting = [threading.Thread(target=lambda: results.append(chat(address))) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until(lambda: total(address, "requests_waiting") == 2)
        for body in (ASK, ASK | {"stream": True}):
            response = chat(address, body)
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert problem(response)["code"] == "overloaded"
        assert total(address, "requests_refused_total") == 2
        stop.set()
        for thread in (first, *waiting):
            thread.join()
        assert [response.status_code for response in results] == [200, 200]
        settled(address)


def test_a_request_larger_than_the_queue_is_its_own_fault():
    with served(max_waiting=2, max_batch_size=2) as address:
        error = problem(chat(address, ASK | {"n": 5}))
        assert error["param"] == "n" and "at most 4" in error["message"]
        assert len(chat(address, ASK | {"n": 4}).json()["choices"]) == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "port: expected an integer"),
        ({"max_streams": 0}, "max_streams: expected"),
        ({"deadline": 0}, "deadline: expected a positive number"),
        ({"drain": float("nan")}, "drain: expected a positive number"),
        ({"api_key": "two words"}, "api_key: expected printable"),
        ({"api_key": "schl\xfcssel"}, "api_key: expected printable"),
        ({"name": ""}, "name: expected"),
        ({"rules": ("match", "guess")}, "rule: expected one of"),
        ({"drafters": ("none", "")}, "drafter: expected"),
        ({"drafters": ("none", "magic")}, "drafter: expected auto or one of"),
        ({"drafters": ("none", "suffix,nodes=few")}, "drafter: nodes: expected int"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        Settings(**SETTINGS | settings)
