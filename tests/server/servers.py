"""Starts servers for tests, in this process or through the command, and sends requests to them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from specengine import Engine
from specengine.server.command import make_server, open_listener
from specengine.server.settings import DRAFTERS, RULES, Settings
from specengine.tensor_parallel.loading import LoadedModel, load_model
from tests.engine.exposition import Family, parsed
from tests.models.files import write_chat_model

LIMIT = 60  # seconds after which a wait fails
HELLO = [{"role": "user", "content": "hello"}]
ASK = {"model": "tiny", "messages": HELLO, "max_tokens": 5}
LONG = {"model": "tiny", "messages": HELLO, "ignore_eos": True, "stream": True}
SETTINGS = {"name": "tiny", "drafters": ("prompt_lookup,adaptive=false", *DRAFTERS), "rules": RULES, "port": 0}


@functools.cache
def chat_folder() -> Path:
    """Writes a tiny random model of bytes with a chat template and a context of 512 tokens."""
    return write_chat_model(Path(tempfile.mkdtemp(prefix="specengine-test-")) / "tiny")


@functools.cache
def chat_model() -> LoadedModel:
    return load_model(chat_folder(), device="cpu")


@functools.cache
def plain_engine() -> Engine:
    return Engine(chat_model(), drafter="none")


@contextlib.contextmanager
def served(model: LoadedModel | None = None, **settings) -> Iterator[str]:
    """Runs a server in a thread of this process and yields its address."""
    chosen = Settings(**{**SETTINGS, **settings})
    with open_listener(chosen.host, chosen.port) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = make_server(model or chat_model(), chosen, listener)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            until(lambda: server.started)
            yield address
        finally:
            server.should_exit = True
            thread.join(LIMIT)
            assert not thread.is_alive(), "the server does not end"


@contextlib.contextmanager
def command(*options: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Runs `specengine serve` and yields its address and its process."""
    words = [sys.executable, "-m", "specengine.cli.main", "serve", "--port", "0", *options]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stderr:
            if found := re.search(r"serving .* at (http://\S+)", line):
                yield found[1], process
                break
        else:
            raise AssertionError(f"the server has ended with {process.wait()}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def chat(address: str, body=ASK, path: str = "/v1/chat/completions", **options) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | options.pop("headers", {})
    return httpx.post(address + path, content=content, headers=headers, timeout=30, **options)


def problem(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def streaming(address: str, body: dict, stop: threading.Event) -> threading.Thread:
    """Starts a client that reads a stream until `stop` is set. Returns once the stream has begun."""
    heard = threading.Event()

    def listen() -> None:
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=30) as response:
            assert response.status_code == 200, response.read()
            for _ in response.iter_lines():
                heard.set()
                if stop.is_set():
                    return

    thread = threading.Thread(target=listen)
    thread.start()
    assert heard.wait(30)
    return thread


def until(condition, seconds: float = LIMIT) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.01)


def metrics(address: str) -> dict[str, Family]:
    return parsed(httpx.get(f"{address}/metrics").text)


def total(address: str, name: str) -> float:
    """Sums a metric over all engines."""
    return sum(metrics(address)[f"specengine_{name}"].samples.values())


def settled(address: str) -> None:
    """Waits until no request runs or waits and all cache pages are free."""
    names = ("requests_running", "requests_waiting", "cache_pages_used", "http_requests_running")
    until(lambda: all(total(address, name) == 0 for name in names))
