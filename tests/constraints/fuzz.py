"""`python -m tests.constraints.fuzz --requests 10000 --json OUT`: constrained requests on SmolLM2.

Every finished text must be valid by an independent validator, and every text must be that of plain constrained decoding
for its seed. A group of requests that takes minutes ends the run with a traceback: none may hang.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specengine import _C, Engine, SamplingParams
from specengine.tensor_parallel.loading import LoadedModel, load_model
from specengine.types import ConstraintFailed
from tests.constraints.random_constraints import problem, random_constraint

DRAFTERS = (
    *("auto", "prompt_lookup", "suffix", "lookahead", "eagle3", "fasteagle", "medusa", "glide", "draft-model"),
    *("ouroboros", "combine:prompt_lookup+fasteagle"),
)
TOKENS = 64  # of a text, at most: most schemas end before
HANGS = 600  # seconds of one group
SHARE = 250  # requests of one seed: a share that fails is repeated by itself


@dataclass
class Tally:
    """What came of the requests of one drafter.  failures: the first ones, with what repeats them."""

    requests: int = 0
    finished: int = 0
    given_up: int = 0
    tokens: int = 0
    cycles: int = 0
    invalid: int = 0
    unequal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class Fuzzer:
    """Draws groups of requests, and runs each with one drafter and with none.  quick: without adaptive drafters."""

    def __init__(self, model: LoadedModel, seed: int, drafters: tuple[str, ...] = DRAFTERS) -> None:
        self._model, self._rng, self._drafters = model, random.Random(seed), drafters
        self._engines: dict[tuple[str, int], Engine] = {}
        self.tallies = {drafter: Tally() for drafter in drafters}

    def run(self, requests: int) -> None:
        """Runs this many requests; drafters take turns."""
        done = number = 0
        while done < requests:
            drafter = self._drafters[number % len(self._drafters)]
            number += 1
            done += self._group(drafter, min(self._rng.randint(1, 16), requests - done))

    def _group(self, drafter: str, size: int) -> int:
        rng, tally = self._rng, self.tallies[drafter]
        # All nodes that a drafter has, or those that pay: the first makes long drafts, the second is what users run.
        spec = drafter if rng.random() < 0.5 or drafter == "auto" else f"{drafter},adaptive=false"
        drafted, plain = self._engine(spec), self._engine("none")
        prompts, params = [], []
        for _ in range(size):
            prompt, constraint = random_constraint(rng)
            temperature = rng.choice((0.0, 0.8))
            own = SamplingParams(
                max_new_tokens=TOKENS,
                min_tokens=rng.choice((0, 0, rng.randrange(TOKENS))),
                temperature=temperature,
                seed=rng.randrange(10**6),
                **constraint,
            )
            try:
                self._model.grammars.constraint(own)
            except ValueError as error:
                tally.refused[str(error)[:80]] += 1
                continue
            prompts.append([{"role": "user", "content": prompt}])
            params.append(own)
        faulthandler.dump_traceback_later(HANGS, exit=True)
        expected, found = _outputs(plain, prompts, params), _outputs(drafted, prompts, params)
        faulthandler.cancel_dump_traceback_later()
        for own, one, other in zip(params, expected, found, strict=True):
            self._judge(tally, spec, own, one, other)
        return size

    def _judge(self, tally: Tally, spec: str, params: SamplingParams, expected: Any, found: Any) -> None:
        tally.requests += 1
        if isinstance(expected, str) or isinstance(found, str):  # the grammar engine gave up
            tally.given_up += 1
            if expected != found:
                tally.unequal += 1
                tally.failures.append({"drafter": spec, "wrong": [str(expected), str(found)], "params": str(params)})
            return
        tally.tokens += len(found.token_ids)
        tally.cycles += found.stats.cycles
        wrong = []
        if found.finish_reason == "stop":
            tally.finished += 1
            if (reason := problem(found.text, params)) is not None:
                tally.invalid += 1
                wrong.append(reason)
        if found.token_ids != expected.token_ids or found.text != expected.text:
            tally.unequal += 1
            wrong.append(f"plain decoding says {expected.text!r}")
        if wrong and len(tally.failures) < 20:
            constraint = {params.constraint: getattr(params, params.constraint)}
            told = {"seed": params.seed, "temperature": params.temperature, "text": found.text, "wrong": wrong}
            tally.failures.append({"drafter": spec, **constraint, **told})

    def _engine(self, spec: str) -> Engine:
        size = self._rng.choice((1, 4, 16))
        if (spec, size) not in self._engines:
            self._engines[spec, size] = Engine(self._model, drafter=spec, max_batch_size=size)
        return self._engines[spec, size]


def _outputs(engine: Engine, prompts: list[Any], params: list[SamplingParams]) -> list[Any]:
    """Returns the outputs; the message in place of one whose grammar is too complex."""
    try:
        return engine.generate(prompts, params)
    except ConstraintFailed as error:
        if len(prompts) == 1:
            return [str(error)]
    return [output for pair in zip(prompts, params, strict=True) for output in _outputs(engine, [pair[0]], [pair[1]])]


def _share(work: tuple[str, int, int, tuple[str, ...]]) -> tuple[int, dict[str, Tally]]:
    """Runs one share of the requests.  work: model, seed, requests, drafters."""
    path, seed, requests, drafters = work
    fuzzer = Fuzzer(load_model(path), seed, drafters)
    fuzzer.run(requests)
    return seed, fuzzer.tallies


def _shares(processes: int, works: list[Any]) -> Iterable[tuple[int, dict[str, Tally]]]:
    if processes == 1:
        yield from map(_share, works)
        return
    threads = max(1, _C.num_threads() // processes)
    with multiprocessing.get_context("spawn").Pool(processes, _C.set_num_threads, (threads,)) as pool:
        yield from pool.imap_unordered(_share, works)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument(
        "--seed", type=int, default=0, help=f"of the first {SHARE} requests; the next have the next one"
    )
    parser.add_argument("--processes", type=int, default=1, help="that share the requests and the cores")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafters", default="", help="separated by spaces")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    drafters = tuple(options.drafters.split()) or DRAFTERS
    tallies = {drafter: Tally() for drafter in drafters}
    starts = range(0, options.requests, SHARE)
    works = [
        (options.model, options.seed + number, min(SHARE, options.requests - start), drafters)
        for number, start in enumerate(starts)
    ]
    for seed, share in _shares(options.processes, works):
        for drafter, tally in share.items():
            tallies[drafter].add(tally)
        failures = sum(len(tally.failures) for tally in share.values())
        print(f"seed {seed}: {failures} failures, {time.perf_counter() - began:.0f} s", flush=True)
    result = {
        "model": options.model,
        "seed": options.seed,
        "requests": sum(tally.requests for tally in tallies.values()),
        "finished": sum(tally.finished for tally in tallies.values()),
        "invalid": sum(tally.invalid for tally in tallies.values()),
        "unequal": sum(tally.unequal for tally in tallies.values()),
        "seconds": round(time.perf_counter() - began, 1),
        "drafters": {name: vars(tally) for name, tally in tallies.items()},
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    raise SystemExit(bool(result["invalid"] or result["unequal"]))


if __name__ == "__main__":
    main()
