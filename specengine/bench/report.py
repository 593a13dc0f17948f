"""Results as JSON values, as a file, and as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from specengine.bench.run import BASE, Run
from specengine.types import PHASES

_DEPTHS_SHOWN = 5
CAPTION = (
    "tokens/s: output tokens over wall time, prefill included, median repetition by time (range of all). "
    "speedup: tokens/s over that of {base} at the same batch. tau: tokens per cycle, bonus token included. "
    "acceptance: share of the cycles drafting to depth 1, 2, ... that accepted a node there. "
    "draft to host: ms per cycle. prefill: share of the wall time. "
    "identical: answers with the tokens of {base}'s in every repetition."
)


def run_dicts(
    runs: Sequence[Run], *, rule: str, temperature: float, floor_seconds: float | None = None
) -> list[dict[str, Any]]:
    """One JSON object per run; all its numbers are of the repetition of median time.

    floor_seconds: what reading the weights once takes; `floor_fraction` is its share of a verification.
    """
    bases = {run.batch: run.median.tokens_per_second for run in reversed(runs) if run.drafter == BASE}
    rows = []
    for run in runs:
        tally, ms = run.median, run.median.ms_per_cycle
        speeds = [each.tokens_per_second for each in run.repetitions]
        rows.append(
            {
                "peer": None,
                "drafter": run.drafter,
                "rule": rule,
                "temperature": temperature,
                "batch": run.batch,
                "tokens_per_second": tally.tokens_per_second,
                "tokens_per_second_spread": [min(speeds), max(speeds)],
                "speedup": tally.tokens_per_second / bases[run.batch],
                "tau": tally.tau,
                "acceptance_by_depth": tally.acceptance_by_depth,
                "ms_per_cycle": ms,
                "identical": f"{sum(run.identical.values())}/{len(run.identical)}",
                "tokens": tally.tokens,
                "cycles": tally.cycles,
                "passes": tally.passes,
                "seconds": tally.seconds,
                "seconds_by_repetition": [each.seconds for each in run.repetitions],
                "prefill_seconds": tally.prefill_seconds,
                "floor_fraction": 1e3 * floor_seconds / ms["verify"] if floor_seconds and ms["verify"] else None,
            }
        )
    return rows


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes a file that is there whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """The rows of `run_dicts` for reading."""
    out = Table(title=title, title_justify="left", caption=CAPTION.format(base=BASE), caption_justify="left")
    out.add_column("drafter", overflow="fold", min_width=13)
    for name in ("batch", "tokens/s", "speedup", "tau"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("acceptance", no_wrap=True)
    for name in (*PHASES, "prefill", "identical"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        low, high = row["tokens_per_second_spread"]
        depths = row["acceptance_by_depth"]
        more = " ..." if len(depths) > _DEPTHS_SHOWN else ""
        out.add_row(
            row["drafter"],
            str(row["batch"]),
            f"{row['tokens_per_second']:.1f} ({low:.1f}-{high:.1f})",
            f"{row['speedup']:.2f}x",
            f"{row['tau']:.2f}",
            " ".join(f"{share:.2f}" for share in depths[:_DEPTHS_SHOWN]) + more,
            *(f"{row['ms_per_cycle'][phase]:.2f}" for phase in PHASES),
            f"{row['prefill_seconds'] / row['seconds']:.0%}",
            row["identical"],
        )
    return out
