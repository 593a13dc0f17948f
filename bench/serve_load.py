"""A server under load, and beside llama.cpp's:

python bench/serve_load.py load OUT.json --seconds 300
python bench/serve_load.py race OUT.json --llama-server path/to/llama-server

`load`: so many clients, and two for whom there is no place, ask again as soon as they have an answer; a quarter of the
requests is left in the middle. Every text that comes to its end is compared with what an engine says that serves one
request at a time; a difference, and any error but the documented refusals, ends the run. At the end nobody may hold a
page, and the server must end when told. Time between tokens: those that come together share it.
`race`: the same questions to both servers by the same clients, one server at a time, several rounds interleaved.
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
STEADY = 1.05  # of memory: the last quarter of a run over the second one


@asynccontextmanager
async def started(command: list[str], ready: str) -> AsyncIterator[tuple[str, psutil.Process]]:
    """A server's address and process. ready: what it says when it listens, with the address as a group."""
    log = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL, stderr=log)
    assert process.stderr is not None
    try:
        async for line in process.stderr:
            if found := re.search(ready, line.decode(errors="replace")):
                break
        else:
            raise SystemExit(f"{command[0]} has ended with {await process.wait()}")
        reading = asyncio.create_task(process.stderr.read())  # else its log fills the pipe
        yield found[1], psutil.Process(process.pid)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60)
        await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def ours(drafter: str, *options: str) -> list[str]:
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
    """The values of a streamed chat. Raises HTTPStatusError for a status other than 200."""
    async with client.stream("POST", f"{address}/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            await response.aread()
            response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                value = json.loads(line[6:])
                if "error" in value:
                    raise SystemExit(f"an answer has ended with {value}")
                yield value


def asked() -> list[tuple[dict, SamplingParams]]:
    """What clients ask for: the request, and the same in the engine's words; half of them greedy, some with a stop."""
    draw, turns = random.Random(1), [question.turns[0] for question in load_files()]
    found = []
    for i in range(REQUESTS):
        words = " ".join(draw.choice(turns).split()[: draw.choice((8, 40, 200))])
        values = {"temperature": 0.8 * (i % 2), "seed": i, "stop": [". "] if i % 5 == 0 else []}
        tokens = draw.randrange(8, 96)
        body = {"model": MODEL, "messages": [{"role": "user", "content": words}], "max_tokens": tokens} | values
        found.append((body, SamplingParams(max_new_tokens=tokens, **values)))
    return found


class Load:
    """The clients and what they see."""

    def __init__(self, address: str, server: psutil.Process, seconds: float, requests: list, alone: list[str]) -> None:
        self.address, self.server, self.requests, self.alone = address, server, requests, alone
        self.began = time.perf_counter()
        self.until = self.began + seconds
        self.finished = self.left = self.tokens = 0
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
            both = [self.server, *self.server.children(recursive=True)]  # chat templates have a process of their own
            self.memory.append((round(now - self.began, 1), sum(each.memory_info().rss for each in both)))
            await asyncio.sleep(1)

    async def _client(self, draw: random.Random) -> None:
        async with httpx.AsyncClient(timeout=None) as client:
            while time.perf_counter() < self.until:
                number = draw.randrange(len(self.requests))
                patience = draw.randrange(30) if draw.random() < CANCELLED else None
                try:
                    text = await self._listen(client, self.requests[number][0], patience)
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
                    raise SystemExit(f"request {number}: {text!r} is not what it gets alone, {self.alone[number]!r}")

    async def _listen(self, client: httpx.AsyncClient, body: dict, patience: int | None) -> str | None:
        """The text of a stream; None where the client went away after so many parts."""
        asked_at = last = time.perf_counter()
        text, parts, spoken, reason = "", 0, False, None
        async with aclosing(events(client, self.address, body | {"speculation": {"tokens": True}})) as values:
            async for value in values:
                choice = value["choices"][0]
                now, text = time.perf_counter(), text + choice["delta"].get("content", "")
                new = sum(cycle["accepted"] + 1 for cycle in choice.get("speculation", {}).get("cycles", ()))
                reason = choice["finish_reason"]
                if new and spoken:
                    self.between += [(now - last) / new] * new
                elif new:
                    self.first.append(now - asked_at)
                last, spoken, parts = now if new else last, spoken or bool(new), parts + 1
                self.tokens += new
                if patience is not None and parts > patience and not reason:
                    return None
        if reason is None:
            raise SystemExit(f"a stream has ended without an end: {text!r}")
        return text


def milliseconds(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 2) for p in (50, 99)}


def growth(memory: list[tuple[float, int]]) -> float | None:
    """The most of the last quarter of a run over that of the second one, before which caches may still fill; None: it
    was too short. What leaks raises the most, while a median is where the buffers of passes, tens of megabytes that
    come and go, happen to lie."""
    quarter = len(memory) // 4
    if quarter < 15:
        return None
    sizes = [size for _, size in memory]
    return max(sizes[-quarter:]) / max(sizes[quarter : 2 * quarter])


async def idle(address: str) -> dict[str, float]:
    """Waits until nobody holds anything; gives what was counted."""
    async with httpx.AsyncClient() as client:
        for _ in range(600):
            text = (await client.get(f"{address}/metrics")).text
            found = dict(re.findall(r"^specengine_(\w+)(?:\{[^\n]*\})? (\S+)$", text, re.M))
            names = ("requests_running", "requests_waiting", "cache_pages_used", "http_requests_running")
            if not any(float(found[name]) for name in names):
                return {name: float(found[name]) for name in ("tau", "cycles_total", "request_cycles_total")}
            await asyncio.sleep(0.1)
    raise SystemExit(f"somebody is left: {text}")


async def load(seconds: float, clients: int, drafter: str) -> dict:
    requests, engine = asked(), Engine(MODEL, drafter="none", max_batch_size=1)
    alone = [engine.generate(body["messages"], params).text for body, params in requests]
    del engine
    async with started(ours(drafter, "--max-streams", str(clients)), OURS_READY) as (address, server):
        run = Load(address, server, seconds, requests, alone)
        await run.run(clients + 2)  # some are refused, and must find a place later
        took, counts = time.perf_counter() - run.began, await idle(address)
    grown = growth(run.memory)
    result = {
        "seconds": round(took, 1),
        "finished_and_equal": run.finished,
        "left": run.left,
        "refused": run.refused,
        "tokens_per_second": round(run.tokens / took, 1),
        "first_token_ms": milliseconds(run.first),
        "between_tokens_ms": milliseconds(run.between),
        "requests_per_cycle": round(counts["request_cycles_total"] / counts["cycles_total"], 2),
        "tau": round(counts["tau"], 3),
        "memory_growth": grown and round(grown, 3),
        "resident_bytes": run.memory,
    }
    if grown and grown > STEADY:
        raise SystemExit(f"memory grows: {json.dumps(result)}")
    return {"drafter": drafter, "clients": clients} | result


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def throughput(address: str, more: dict, concurrency: int, requests: int, tokens: int) -> dict[str, float]:
    """Tokens per second of so many requests, so many at a time; every answer has as many tokens."""
    turns = itertools.cycle([question.turns[0] for question in load_files()])
    waiting, first = [next(turns) for _ in range(requests)], []

    async def client() -> None:
        # A connection each: llama.cpp's server closes them behind a stream, at a moment of its choice.
        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_keepalive_connections=0)) as one:
            while waiting:
                messages = [{"role": "user", "content": waiting.pop()}]
                body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "temperature": 0}
                began, heard, usage = time.perf_counter(), False, None
                options = {"ignore_eos": True, "stream_options": {"include_usage": True}}
                async for value in events(one, address, body | options | more):
                    if not heard and value["choices"] and value["choices"][0]["delta"].get("content"):
                        heard = True
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
    most, threads = max(concurrencies), os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
    model = fetch_embedded(MODEL)
    theirs = [server, "-m", str(model), "-t", threads, "-np", str(most), "-c", str(2048 * most), "--jinja"]
    theirs += ["--host", "127.0.0.1", "--port", str(free_port())]
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    async with AsyncExitStack() as stack:
        command = ours(drafter, "--max-batch-size", str(most), "--prefix-cache-mib", "0")
        address, _ = await stack.enter_async_context(started(command, OURS_READY))
        other, _ = await stack.enter_async_context(started(theirs, r"listening on (http://\S+)"))
        # A question that is asked again is read again by both.
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
                found.setdefault((name, concurrency), []).append(one)
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
            for (name, concurrency), runs in found.items()
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("load", "race"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--seconds", type=float, default=300, help="of load")
    parser.add_argument("--clients", type=int, default=32, help="of load")
    parser.add_argument("--llama-server", default="llama-server", help="the program to race")
    parser.add_argument("--concurrency", default="1,4,16", help="requests at a time, of race")
    parser.add_argument("--rounds", type=int, default=3, help="of race")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, in race")
    given = parser.parse_args()
    load_model(MODEL)  # fetched before anything is timed
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
