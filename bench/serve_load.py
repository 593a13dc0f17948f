"""Measures a server under load, and beside llama.cpp's server:

python bench/serve_load.py load OUT.json --seconds 300
python bench/serve_load.py race OUT.json --llama-server path/to/llama-server

`load`: as many clients as the server takes streams, and two more, send a request right after each answer. They cancel a
quarter of the requests. Every finished text is compared with that of an engine that serves one request at a time. A
difference ends the run, and so does any error except the documented refusals. At the end no request may hold a page,
and the server must stop at SIGTERM. Tokens that arrive together share their time between tokens.
`race`: the same clients ask both servers the same questions, one server at a time, in several interleaved rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path

import httpx
import psutil

from specengine import Engine, SamplingParams
from specengine.bench.machine import commit, machine, versions
from specengine.bench.race.questions import load_files
from specengine.hub.embedded_models import fetch_embedded
from specengine.tensor_parallel.loading import load_model

MODEL = "smollm2-135m"
CANCELLED, REQUESTS = 0.25, 48
REFUSALS = (429, 503)
STEADY = 1.05  # largest growth of memory, from the second quarter of a run to the last


@asynccontextmanager
async def started(command: list[str], ready: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Starts a server and yields its address and process.

    ready: pattern of the line that the server logs when it listens, with the address as a group.
    """
    log = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=log)
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if listening := re.search(ready, line.decode(errors="replace")):
                break
        else:
            raise SystemExit(f"{command[0]} has ended with {await process.wait()}")
        reading = asyncio.create_task(process.stderr.read())  # or its log fills the pipe and blocks it
        yield listening[1], psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)
        await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def serve_command(drafter: str, *options: str) -> list[str]:
    """Returns the command of specengine's server at any free port."""
    command = [
        sys.executable,
        "-m",
        "specengine.cli.main",
        "serve",
        "--model",
        MODEL,
        "--port",
        "0",
        "--drafter",
        drafter,
    ]
    return [*command, *options]


OURS_READY = r"serving .* at (http://\S+)"


async def events(client: httpx.AsyncClient, address: str, body: dict) -> AsyncGenerator[dict, None]:
    """Yields the values of a streamed chat. Raises HTTPStatusError for a status other than 200."""
    async with client.stream("POST", f"{address}/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
            response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                value = json.loads(line[6:])
                if "error" in value:
                    raise SystemExit(f"a stream ended with {value}")
                yield value


def make_requests() -> list[tuple[dict, SamplingParams]]:
    """Returns requests as HTTP bodies and as sampling parameters; half are greedy, some have a stop string."""
    draw = random.Random(1)
    turns = [question.turns[0] for question in load_files()]
    requests = []
    for i in range(REQUESTS):
        words = " ".join(draw.choice(turns).split()[: draw.choice((8, 40, 200))])
        values = {"temperature": 0.8 * (i % 2), "seed": i, "stop": [". "] if i % 5 == 0 else []}
        tokens = draw.randrange(8, 96)
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": tokens} | values
        requests.append((body, SamplingParams(max_new_tokens=tokens, **values)))
    return requests


class Load:
    """Runs the clients, and records texts, times and memory."""

    def __init__(self, address: str, server: psutil.Process, seconds: float, requests: list, alone: list[str]) -> None:
        self.address = address
        self.server = server
        self.requests = requests
        self.alone = alone
        self.began = time.perf_counter()
        self.until = self.began + seconds
        self.finished = 0
        self.left = 0
        self.tokens = 0
        self.refused: dict[int, int] = dict.fromkeys(REFUSALS, 0)
        self.first: list[float] = []
        self.between: list[float] = []
        self.memory: list[tuple[float, int]] = []

    async def run(self, clients: int) -> None:
        watching = asyncio.create_task(self._watch())
        await asyncio.gather(*(self._client(random.Random(number)) for number in range(clients)))
        await watching

    async def _watch(self) -> None:
        while (now := time.perf_counter()) < self.until:
            both = [self.server, *self.server.children(recursive=True)]  # a child process renders chat templates
            self.memory.append((round(now - self.began, 1), sum(each.memory_info().rss for each in both)))
            await asyncio.sleep(1)

    async def _client(self, draw: random.Random) -> None:
        async with httpx.AsyncClient(timeout=None) as client:
            while time.perf_counter() < self.until:
                number = draw.randrange(len(self.requests))
                cancel_after = draw.randrange(30) if draw.random() < CANCELLED else None
                try:
                    text = await self._stream(client, self.requests[number][0], cancel_after)
                except httpx.HTTPStatusError as error:
                    status, wait = error.response.status_code, error.response.headers.get("retry-after")
                    if status not in REFUSALS or wait is None:
                        raise SystemExit(f"request {number}: {status} {error.response.text}") from error
                    self.refused[status] += 1
                    await asyncio.sleep(float(wait) * draw.uniform(0.5, 1.5))
                    continue
                if text is None:
                    self.left += 1
                    continue
                self.finished += 1
                if text != self.alone[number]:
                    raise SystemExit(f"request {number}: {text!r} differs from its text alone, {self.alone[number]!r}")

    async def _stream(self, client: httpx.AsyncClient, body: dict, cancel_after: int | None) -> str | None:
        """Returns the text of a stream; None for a stream that is cancelled after `cancel_after` events."""
        asked_at = time.perf_counter()
        last = asked_at
        text = ""
        parts = 0
        has_tokens = False
        reason = None
        async with aclosing(events(client, self.address, body | {"speculation": {"tokens": True}})) as values:
            async for value in values:
                choice = value["choices"][0]
                now = time.perf_counter()
                text += choice["delta"].get("content", "")
                new = sum(cycle["accepted"] + 1 for cycle in choice.get("speculation", {}).get("cycles", ()))
                reason = choice["finish_reason"]
                if new and has_tokens:
                    self.between += [(now - last) / new] * new
                elif new:
                    self.first.append(now - asked_at)
                last = now if new else last
                has_tokens = has_tokens or bool(new)
                parts += 1
                self.tokens += new
                if cancel_after is not None and parts > cancel_after and not reason:
                    return None
        if reason is None:
            raise SystemExit(f"a stream ended without a finish reason: {text!r}")
        return text


def milliseconds(values: list[float]) -> dict[str, float]:
    """Returns percentiles of seconds as milliseconds."""
    ordered = sorted(values)
    return {f"p{p}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in (50, 99)}


def growth(memory: list[tuple[float, int]]) -> float | None:
    """Returns the peak of the last quarter of a run over that of the second quarter; None for a short run.

    Caches fill in the first quarter. A leak raises the peak. A median depends on the buffers of passes, which take and
    free tens of megabytes.
    """
    quarter = len(memory) // 4
    if quarter < 15:
        return None
    sizes = [size for _, size in memory]
    return max(sizes[-quarter:]) / max(sizes[quarter : 2 * quarter])


async def idle(address: str) -> dict[str, float]:
    """Waits until no request holds a page or a stream. Returns the counters of the server."""
    async with httpx.AsyncClient() as client:
        for _ in range(600):
            text = (await client.get(f"{address}/metrics")).text
            metrics = dict(re.findall(r"^specengine_(\w+)(?:\{[^\n]*\})? (\S+)$", text, re.M))
            names = ("requests_running", "requests_waiting", "cache_pages_used", "http_requests_running")
            if not any(float(metrics[name]) for name in names):
                return {name: float(metrics[name]) for name in ("tau", "cycles_total", "request_cycles_total")}
            await asyncio.sleep(0.1)
    raise SystemExit(f"requests are left: {text}")


async def load(seconds: float, clients: int, drafter: str) -> dict:
    """Runs the load. Returns its results."""
    requests = make_requests()
    engine = Engine(MODEL, drafter="none", max_batch_size=1)
    alone = [engine.generate(body["messages"], params).text for body, params in requests]
    del engine
    async with started(serve_command(drafter, "--max-streams", str(clients)), OURS_READY) as (address, server):
        run = Load(address, server, seconds, requests, alone)
        await run.run(clients + 2)  # the server refuses two at a time and takes them later
        took = time.perf_counter() - run.began
        counts = await idle(address)
    grown = growth(run.memory)
    result = {
        "seconds": round(took, 1),
        "finished_and_equal": run.finished,
        "left": run.left,
        "refused": run.refused,
        "tokens_per_second": round(run.tokens / took, 1),
        "first_token_ms": milliseconds(run.first),
        "between_tokens_ms": milliseconds(run.between),
        # The field keeps the name that recorded runs have.
        "sequences_per_cycle": round(counts["request_cycles_total"] / counts["cycles_total"], 2),
        "tau": round(counts["tau"], 3),
        "memory_growth": grown and round(grown, 3),
        "resident_bytes": run.memory,
    }
    if grown and grown > STEADY:
        raise SystemExit(f"memory grows: {json.dumps(result)}")
    return {"drafter": drafter, "clients": clients} | result


def free_port() -> int:
    """Returns a free local port."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def throughput(address: str, more: dict, concurrency: int, requests: int, tokens: int) -> dict[str, float]:
    """Returns tokens per second of `requests` answers of `tokens` tokens, `concurrency` at a time.

    more: fields added to each request.
    """
    turns = itertools.cycle([question.turns[0] for question in load_files()])
    waiting = [next(turns) for _ in range(requests)]
    first: list[float] = []

    async def client() -> None:
        # One connection per request: llama.cpp's server closes a connection at any time after its stream.
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_keepalive_connections=0)) as one:
            while waiting:
                messages = [{"role": "user", "content": waiting.pop()}]
                body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0}
                began = time.perf_counter()
                has_content = False
                usage = None
                options = {"ignore_eos": True, "stream_options": {"include_usage": True}}
                async for value in events(one, address, body | options | more):
                    if not has_content and value["choices"] and value["choices"][0]["delta"].get("content"):
                        has_content = True
                        first.append(time.perf_counter() - began)
                    usage = value.get("usage") or usage
                assert usage and usage["completion_tokens"] == tokens, usage

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    return {
        "tokens_per_second": requests * tokens / (time.perf_counter() - began),
        "first_token_ms": 1e3 * statistics.median(first),
    }


async def race(server: str, concurrencies: list[int], rounds: int, tokens: int, drafter: str) -> dict:
    """Runs the race against llama.cpp's server. Returns its results."""
    most = max(concurrencies)
    threads = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    model = fetch_embedded(MODEL)
    theirs = [server, "-m", str(model), "-t", threads, "-np", str(most), "-c", str(2048 * most), "--jinja"]
    theirs += ["--host", "127.0.0.1", "--port", str(free_port())]
    measured: dict[tuple[str, int], list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        command = serve_command(drafter, "--max-batch-size", str(most), "--prefix-cache-mib", "0")
        address, _ = await stack.enter_async_context(started(command, OURS_READY))
        other, _ = await stack.enter_async_context(started(theirs, r"listening on (http://\S+)"))
        # Both servers run without a prefix cache, because questions repeat.
        contenders = {
            f"specengine, {drafter}": (address, {}),
            "specengine, none": (address, {"speculation": {"off": True}}),
            "llama.cpp": (other, {"cache_prompt": False}),
        }
        for name, (where, more) in contenders.items():
            print(name, await throughput(where, more, 1, 2, tokens), "(warm-up)", flush=True)
        for number in range(rounds):
            for concurrency, (name, (where, more)) in itertools.product(concurrencies, contenders.items()):
                one = await throughput(where, more, concurrency, max(4, 2 * concurrency), tokens)
                measured.setdefault((name, concurrency), []).append(one)
                print(number, concurrency, name, one, flush=True)
    version = subprocess.run([server, "--version"], capture_output=True, text=True).stderr.split("\n")[0]
    return {
        "tokens": tokens,
        "rounds": rounds,
        "llama_server": {"version": version, "command": theirs[1:]},
        "servers": [
            {"server": name, "concurrency": concurrency}
            | {key: round(statistics.median(one[key] for one in runs), 2) for key in runs[0]}
            | {"rounds": [round(one["tokens_per_second"], 1) for one in runs]}
            for (name, concurrency), runs in measured.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "race"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--seconds", type=float, default=300, help="duration of load")
    parser.add_argument("--clients", type=int, default=32, help="clients of load")
    parser.add_argument("--llama-server", default="llama-server", help="path of llama.cpp's server")
    parser.add_argument("--concurrency", default="1,4,16", help="requests at a time in race")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of race")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer in race")
    given = parser.parse_args()
    load_model(MODEL)  # downloads it before anything is timed
    if given.what == "load":
        result = asyncio.run(load(given.seconds, given.clients, given.drafter))
    else:
        concurrencies = [int(each) for each in given.concurrency.split(",")]
        result = asyncio.run(race(given.llama_server, concurrencies, given.rounds, given.tokens, given.drafter))
    about = {"command": " ".join(sys.argv), "model": MODEL, "machine": machine(), "versions": versions()}
    text = json.dumps(about | {"commit": commit()} | result, indent=1)
    given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
