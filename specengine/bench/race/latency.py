"""Latency: time to the first token, and time between tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rich.table import Table

PERCENTILES = (50, 95, 99)
CAPTION = (
    "first token: ms from the request to its first token, median of the answers; it includes the prefills of the whole "
    "batch. between tokens: ms from one token to the next as they are delivered; tokens accepted together are 0 ms "
    "apart. floor: time to read the weights once at the memory's speed, as a share of a verification. memory: peak of "
    "a process that runs this configuration alone (with --memory)."
)


def gaps(deliveries: Sequence[tuple[float, int]]) -> list[float]:
    """Returns the seconds between each token and the one before it. deliveries: (seconds, number of tokens)."""
    times = [seconds for seconds, count in deliveries for _ in range(count)]
    return [later - sooner for sooner, later in pairwise(times)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Returns the smallest value v with at least `share` percent of the values <= v; None for no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)] if ordered else None


def latency_dict(first: Sequence[float], between: Sequence[float]) -> dict[str, Any]:
    """Returns milliseconds by name; None where an answer was delivered at once."""
    waits = {f"p{share}": _ms(percentile(between, share)) for share in PERCENTILES}
    return {"first_token_ms": _ms(percentile(first, 50)), "token_gap_ms": waits}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def latency_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the rows of `run_dicts` as a table of latencies."""
    out = Table(title="latency, ms", title_justify="left", caption=CAPTION, caption_justify="left", min_width=90)
    out.add_column("drafter", overflow="fold", min_width=13)
    between = [f"between tokens p{share}" if share == PERCENTILES[0] else f"p{share}" for share in PERCENTILES]
    for name in ("batch", "first token", *between, "floor", "memory"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        waits = row["token_gap_ms"]
        memory = row["peak_memory_bytes"]
        floor = row["floor_fraction"]
        out.add_row(
            row["label"],
            str(row["batch"]),
            _figure(row["first_token_ms"]),
            *(_figure(waits[f"p{share}"]) for share in PERCENTILES),
            f"{floor:.0%}" if floor else "",
            f"{memory / 2**20:.0f} MiB" if memory else "",
        )
    return out


def _figure(ms: float | None) -> str:
    return "" if ms is None else f"{ms:.1f}"
