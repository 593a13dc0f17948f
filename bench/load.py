"""Runs many streams at once and cancels some: python bench/load.py SECONDS OUT.json [MODEL] [DRAFTER]

Each of 64 clients sends its next request right after an answer. Every finished text is compared with that of an engine
that serves one request at a time; a difference ends the run. At the end no request may hold a page of the cache.
`growth` compares the memory of the last minute with that of the second minute, because the first one fills the caches.
"""

from __future__ import annotations

import asyncio
import json
import platform
import random
import shlex
import sys
import time
from bisect import bisect_right
from collections import Counter
from contextlib import aclosing
from itertools import accumulate
from pathlib import Path
from statistics import mean

from soak import resident_bytes

from specengine import AsyncEngine, Engine, SamplingParams
from specengine.tensor_parallel.loading import load_model

STREAMS, REQUESTS, CANCELLED = 64, 32, 0.25


def make_requests(vocab: int) -> list[tuple[list[int], SamplingParams]]:
    """Returns prompts and parameters: some prompts repeat a part, half of the texts are greedy, half are sampled."""
    draw = random.Random(1)
    return [
        (
            [draw.randrange(3, vocab) for _ in range(draw.choice((5, 20, 100)))] * draw.choice((1, 3)),
            SamplingParams(
                max_new_tokens=draw.randrange(8, 64), temperature=0.8 * (i % 2), seed=i, ignore_eos=i % 3 == 0
            ),
        )
        for i in range(REQUESTS)
    ]


class Load:
    """Runs the clients, and records tokens, times and memory."""

    def __init__(self, serving: AsyncEngine, requests: list, alone: list[list[int]], seconds: float) -> None:
        self.serving = serving
        self.requests = requests
        self.alone = alone
        self.began = time.perf_counter()
        self.until = self.began + seconds
        self.finished = 0
        self.cancelled = 0
        self.tokens = 0
        # Counted by tenths of a millisecond: lists of times would grow, as a leak does.
        self.first: Counter[int] = Counter()
        self.between: Counter[int] = Counter()
        self.memory: list[tuple[float, int]] = []

    async def run(self) -> None:
        await asyncio.gather(self._watch(), *(self._client(random.Random(client)) for client in range(STREAMS)))

    async def _watch(self) -> None:
        while (now := time.perf_counter()) < self.until:
            self.memory.append((round(now - self.began, 1), resident_bytes()))
            await asyncio.sleep(1)

    async def _client(self, draw: random.Random) -> None:
        while time.perf_counter() < self.until:
            i = draw.randrange(len(self.requests))
            cancel_after = draw.randrange(1, 30) if draw.random() < CANCELLED else None
            prompt, params = self.requests[i]
            tokens = await self._stream(prompt, params, cancel_after)
            if tokens is None:
                self.cancelled += 1
                continue
            self.finished += 1
            if tokens != self.alone[i]:
                raise SystemExit(f"request {i}: {tokens} differs from its tokens alone, {self.alone[i]}")

    async def _stream(self, prompt: list[int], params: SamplingParams, cancel_after: int | None) -> list[int] | None:
        """Returns the tokens of a stream; None for a stream that is cancelled after `cancel_after` events."""
        last = time.perf_counter()
        events = 0
        tokens: list[int] = []
        async with aclosing(self.serving.stream(prompt, params)) as stream:
            async for event in stream:
                now = time.perf_counter()
                new = len(event.token_ids)
                if tokens:
                    self.between[round(1e4 * (now - last) / new)] += new
                else:
                    self.first[round(1e4 * (now - last))] += 1
                last = now
                events += 1
                tokens += event.token_ids
                self.tokens += new
                if events == cancel_after and not event.output:
                    return None
        return tokens


def milliseconds(counts: Counter[int]) -> dict[str, float]:
    """Returns percentiles of times that are counted by tenths of a millisecond."""
    found = {}
    ordered = sorted(counts.items())
    sums = list(accumulate(count for _, count in ordered))
    for percent in (50, 99):
        at = bisect_right(sums, sums[-1] * percent // 100 - 1)
        found[f"p{percent}"] = ordered[at][0] / 10
    return found


def growth(memory: list[tuple[float, int]]) -> float | None:
    """Returns the growth of mean memory from the second minute to the last; None for less than three minutes."""
    end = memory[-1][0]
    if end < 180:
        return None
    early, late = ([size for at, size in memory if begin <= at < begin + 60] for begin in (60, end - 60))
    return round(mean(late) / mean(early) - 1, 4)


async def run_load(engine: Engine, requests: list, alone: list[list[int]], seconds: float) -> dict:
    """Returns what the clients measured. The engine must be idle and hold no page afterwards."""
    async with AsyncEngine(engine) as serving:
        load = Load(serving, requests, alone, seconds)
        await load.run()
    took = time.perf_counter() - load.began
    counts = engine.metrics.snapshot()
    assert (counts.running, counts.waiting, counts.pages_used) == (0, 0, 0), counts
    return {
        "seconds": round(took, 1),
        "finished_and_equal": load.finished,
        "cancelled": load.cancelled,
        "tokens_per_second": round(load.tokens / took, 1),
        "first_token_ms": milliseconds(load.first),
        "between_tokens_ms": milliseconds(load.between),
        # The field keeps the name that recorded runs have.
        "sequences_per_cycle": round(counts.request_cycles / counts.cycles, 2),
        "tau": round(counts.tau, 3),
        "seconds_by_phase": {phase: round(value, 2) for phase, value in counts.seconds_by_phase.items()},
        "finished": counts.finished,
        "growth": growth(load.memory),
        "resident_bytes": load.memory[::10],
    }


def main(seconds: float, out: Path, name: str = "smollm2-135m", drafter: str = "auto") -> None:
    model = load_model(name)
    requests = make_requests(model.config.vocab_size)
    single = Engine(model, drafter=drafter, max_batch_size=1)
    alone = [single.generate(prompt, params).token_ids for prompt, params in requests]
    result = asyncio.run(run_load(Engine(model, drafter=drafter), requests, alone, seconds))
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "model": name,
        "drafter": drafter,
        "streams": STREAMS,
        "machine": platform.machine(),
    }
    out.write_text(json.dumps(about | result, indent=1) + "\n")
    print(json.dumps(about | result, indent=1))


if __name__ == "__main__":
    main(float(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
