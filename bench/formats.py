"""Compares weight formats of one model: python bench/formats.py OUT.json MODEL...

Each MODEL is plain decoding's and `auto`'s target in interleaved rounds; the first one runs plain twice, as control.
Every model's text with drafts is compared with its text without. Perplexity is measured with the kept codes and with
the same weights as float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from specengine import Engine, SamplingParams
from specengine.bench.machine import commit, machine, versions
from specengine.bench.quality.perplexity import TEXT, perplexity
from specengine.bench.race.questions import BUILT_IN, load_files
from specengine.bench.report.writing import write_json
from specengine.tensor_parallel.loading import load_model


class Contender:
    """One model with one drafter, and the seconds of its rounds."""

    def __init__(self, model: str, drafter: str, engine: Engine) -> None:
        self.model, self.drafter, self.engine = model, drafter, engine
        self.seconds: list[float] = []
        self.tokens: list[list[int]] = []

    def run(self, prompts: list[Any], params: SamplingParams) -> None:
        """Answers all prompts, one at a time."""
        began = time.perf_counter()
        outputs = [self.engine.generate(prompt, params) for prompt in prompts]
        self.seconds.append(time.perf_counter() - began)
        self.tokens = [output.token_ids for output in outputs]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round."""
        return [sum(map(len, self.tokens)) / seconds for seconds in self.seconds]


def race(models: list[str], rounds: int, questions: int, tokens: int) -> list[dict[str, Any]]:
    """Returns the row of each contender; ratios are medians of the rounds' ratios to the first model's plain run."""
    loaded = {model: load_model(model) for model in dict.fromkeys(models)}
    runs = [(model, drafter) for model in models for drafter in ("none", "auto")]
    runs.insert(1, (models[0], "none"))  # the control
    contenders = [Contender(model, drafter, Engine(loaded[model], drafter=drafter)) for model, drafter in runs]
    chosen = load_files([BUILT_IN], questions)
    prompts = [[{"role": "user", "content": question.turns[0]}] for question in chosen]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)  # all generate as many tokens
    for contender in contenders:
        contender.run(prompts[:2], params)  # warms up
        contender.seconds.clear()
    for number in range(rounds):
        for contender in contenders[number % len(contenders) :] + contenders[: number % len(contenders)]:
            contender.run(prompts, params)
    plain = {contender.model: contender for contender in contenders if contender.drafter == "none"}
    first = contenders[0].rates
    return [
        {
            "model": each.model,
            "drafter": each.drafter,
            "tokens_per_second": round(statistics.median(each.rates), 1),
            "ms_per_token": round(1000 / statistics.median(each.rates), 3),
            "over_first": round(statistics.median(a / b for a, b in zip(each.rates, first, strict=True)), 3),
            "same_text_as_plain": each.tokens == plain[each.model].tokens,
            "rounds": [round(rate, 1) for rate in each.rates],
        }
        for each in contenders
    ]


def quality(model: str) -> dict[str, Any]:
    """Returns bytes and perplexity of a model with its codes, and as float32."""
    text = TEXT.read_text(encoding="utf-8")
    found: dict[str, Any] = {"model": model}
    for dtype in ("auto", "float32"):
        loaded = load_model(model, dtype=dtype)
        found |= {
            f"formats_{dtype}": sorted(loaded.target.formats),
            f"mib_{dtype}": round(loaded.target.weight_bytes() / 2**20, 1),
            f"perplexity_{dtype}": perplexity(loaded.target, loaded.tokenizer.encode(text)),
        }
    return found | {"ratio": found["perplexity_auto"] / found["perplexity_float32"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    given = parser.parse_args()
    formats = [quality(model) for model in given.models]
    for row in formats:
        print(row, flush=True)
    rows = race(given.models, given.rounds, given.questions, given.tokens)
    for row in rows:
        print(row, flush=True)
    result = {"command": " ".join(sys.argv), "machine": machine(), "versions": versions(), "commit": commit()}
    write_json(given.out, result | {"model": given.models[0], "formats": formats, "race": rows})


if __name__ == "__main__":
    main()
