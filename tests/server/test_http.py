"""HTTP itself: methods, heads, encodings, other origins, and connections that bring no request."""

import contextlib
import gzip
import json
import socket
import time
from urllib.parse import urlsplit

import httpx
import pytest

from specengine.server import connection
from tests.server.servers import ASK, chat, problem, served

ORIGIN = "https://app.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def address():
    with served(api_key="secret-1", allowed_origins=(ORIGIN.upper(),)) as address:
        yield address


@contextlib.contextmanager
def connected(address: str):
    host = urlsplit(address)
    with socket.create_connection((host.hostname, host.port), timeout=30) as client:
        yield client


def keyed(scheme: str = "Bearer", **headers: str) -> dict[str, str]:
    return {"authorization": f"{scheme} secret-1", **headers}


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/", "/v1/models/tiny"])
def test_head_answers_as_get_without_the_body(address, path):
    got, head = (httpx.request(method, address + path, headers=keyed()) for method in ("GET", "HEAD"))
    assert (got.status_code, head.status_code, head.content) == (200, 200, b"")
    assert got.headers["content-type"] == head.headers["content-type"]
    if path != "/metrics":  # its counts grow
        assert head.headers["content-length"] == str(len(got.content))


def test_head_is_refused_as_get_is(address):
    assert httpx.head(f"{address}/v1/models").status_code == 401
    assert httpx.head(f"{address}/v1/models/other", headers=keyed()).status_code == 404
    assert httpx.head(f"{address}/v1/completions", headers=keyed()).status_code == 405


def test_the_list_of_models_may_end_with_a_slash(address):
    lists = [httpx.get(f"{address}/v1/models{end}", headers=keyed()).json() for end in ("", "/")]
    assert lists[0] == lists[1] and lists[0]["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("bearer secret-1", 200),
        ("BEARER  secret-1", 200),
        ("Basic secret-1", 401),
        ("Bearer SECRET-1", 401),
        ("Bearer secret-1 more", 401),
        ("secret-1", 401),
        ("Bearer", 401),
    ],
)
def test_the_case_of_the_scheme_does_not_matter_and_that_of_the_key_does(address, given, status):
    assert httpx.get(f"{address}/v1/models", headers={"authorization": given}).status_code == status


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br", 415), ("GZIP, gzip", 415), ("Identity", 200)])
def test_encoded_bodies_are_refused_by_the_header_s_name(address, encoding, status):
    body = json.dumps(ASK).encode()
    body = body if status == 200 else gzip.compress(body)
    response = chat(address, body, headers=keyed(**{"content-encoding": encoding}))
    assert response.status_code == status
    if status == 415:
        assert problem(response)["message"].startswith("content-encoding: ")
        assert response.headers["accept-encoding"] == "identity"


def test_pages_of_allowed_origins_may_ask_and_read(address):
    """Errors too: without the header a page could not tell a full server from a broken one."""
    path = f"{address}/v1/chat/completions"
    allowed = httpx.options(path, headers={"origin": ORIGIN, **PREFLIGHT})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == ORIGIN
    assert {"authorization", "content-type"} <= set(allowed.headers["access-control-allow-headers"].split(","))
    for headers, status in ((keyed(origin=ORIGIN), 200), ({"origin": ORIGIN}, 401)):
        response = chat(address, headers=headers)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert response.headers["access-control-expose-headers"] == "Retry-After"


def test_pages_of_other_origins_may_not(address):
    for origin in ("https://app.example.evil", "http://app.example", "null"):
        refused = httpx.options(f"{address}/v1/chat/completions", headers={"origin": origin, **PREFLIGHT})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        response = httpx.get(f"{address}/health", headers={"origin": origin})
        assert "access-control-allow-origin" not in response.headers


def test_without_the_option_no_page_may_and_with_a_star_every_page():
    for settings, status, allowed in (({}, 405, None), ({"allowed_origins": ("*",)}, 200, "*")):
        with served(**settings) as address:
            response = httpx.options(f"{address}/v1/models", headers={"origin": ORIGIN, **PREFLIGHT})
            assert response.status_code == status
            assert response.headers.get("access-control-allow-origin") == allowed


@pytest.mark.parametrize("size", [60_000, 70_000, 300_000])
@pytest.mark.parametrize("pieces", [1, 10])
def test_a_head_has_at_most_64_kib_in_however_many_pieces(address, size, pieces):
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"x" * size + b"\r\n\r\n"
    with connected(address) as client:
        with contextlib.suppress(ConnectionError):  # refused before its end
            for start in range(0, len(head), -(-len(head) // pieces)):
                client.sendall(head[start : start - (-len(head) // pieces)])
                time.sleep(0.002 * (pieces - 1))
        status = client.recv(12)
    if pieces == 10 and size == 70_000:  # what has come without its end stays below the limit
        assert status == b"HTTP/1.1 431"
    assert status in ([b"HTTP/1.1 200"] if size < 1 << 16 else [b"HTTP/1.1 431", b"HTTP/1.1 400"])


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: local",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",  # 401 before its body
    ],
    ids=["nothing", "head", "second head", "body of a refused request"],
)
def test_a_connection_that_brings_no_request_is_closed(address, monkeypatch, begun):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    began = time.monotonic()
    with connected(address) as client:
        client.sendall(begun)
        client.settimeout(0.05)
        while time.monotonic() < began + 10:
            try:
                if client.recv(4096) == b"":
                    break
            except TimeoutError:
                with contextlib.suppress(ConnectionError):  # single bytes do not keep it open
                    client.sendall(b"x" if begun else b"")
            except ConnectionError:
                break
    assert 0.25 < time.monotonic() - began < 5


def test_a_request_that_takes_longer_than_a_head_may_is_answered(address, monkeypatch, slow):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.1)
    assert chat(address, ASK | {"max_tokens": 12, "ignore_eos": True}, headers=keyed()).status_code == 200
