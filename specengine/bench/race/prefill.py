"""Time of a prefill and its first token, for all engines in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from specengine.bench.peers.base import Peer
from specengine.bench.race.contenders import BASE, ContenderEngine, open_contender
from specengine.bench.race.race import ask, pause_between
from specengine.bench.report.labels import short_labels
from specengine.tensor_parallel.loading import LoadedModel
from specengine.types import SamplingParams

TEXT = Path(__file__).parents[1] / "data" / "text.txt"
_REPETITIONS = 3  # at least


def long_prompt(model: LoadedModel, count: int) -> list[int]:
    """Returns `count` token ids of the package's text, repeated; consecutive ids for a model without a tokenizer.

    Raises ValueError for a count that the context cannot hold.
    """
    if not 1 <= count < model.config.max_position:
        raise ValueError(f"prefill: expected 1 to {model.config.max_position - 1} tokens, got {count}")
    if model.tokenizer is None:
        return [i % model.config.vocab_size for i in range(count)]
    return list(islice(cycle(model.tokenizer.encode(TEXT.read_text(encoding="utf-8"))), count))


def time_prefill(
    model: LoadedModel, drafters: Sequence[str], peers: Sequence[Peer], ids: list[int], repetitions: int
) -> list[dict[str, Any]]:
    """Returns a row per drafter and peer with the median seconds to the first token; a peer that failed has no row."""
    engines: list[ContenderEngine | Peer] = [*(open_contender(model, name) for name in drafters), *peers]
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    seconds: list[list[float]] = [[] for _ in engines]
    for turn in range(max(_REPETITIONS, repetitions) + 1):
        for step in range(len(engines)):
            position = (turn + step) % len(engines)
            _, spent = ask(engines[position], [ids], [params], pause_between(engines))
            if turn:  # the first is a warm-up
                seconds[position].append(spent)
    named = [*((name, None) for name in drafters), *((peer.drafter, peer.mode) for peer in peers)]
    labels = [mode or label for (_, mode), label in zip(named, short_labels([name for name, _ in named]), strict=True)]
    rows: list[dict[str, Any]] = [
        {"peer": mode, "drafter": name, "label": label, "tokens": len(ids), "seconds": median(spent)}
        for (name, mode), label, spent, engine in zip(named, labels, seconds, engines, strict=True)
        if not (isinstance(engine, Peer) and engine.failed)
    ]
    base = next(row["seconds"] for row in rows if row["drafter"] == BASE and row["peer"] is None)
    return [{**row, "tokens_per_second": len(ids) / row["seconds"], "ratio": row["seconds"] / base} for row in rows]


def prefill_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the rows of `time_prefill` as a table."""
    out = Table(title=f"a prompt of {rows[0]['tokens']} tokens and the first token after it", title_justify="left")
    out.add_column("drafter")
    for name in ("ms", "prompt tokens/s", f"time over {BASE}"):
        out.add_column(name, justify="right")
    for row in rows:
        out.add_row(
            row["label"],
            f"{1e3 * row['seconds']:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}x",
        )
    return out
