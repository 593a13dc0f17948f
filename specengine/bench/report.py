"""Results as JSON values, as a file, and as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from specengine.bench.labels import short_labels
from specengine.bench.run import BASE, Run
from specengine.bench.tally import Tally
from specengine.types import PHASES

DEPTHS = 6  # of a tree, that tables and pictures show
CAPTION = (
    "tokens/s: output tokens over wall time, prefill included, median repetition by time (range of all). "
    "speedup: tokens/s over that of {base} at the same batch. tau: tokens per cycle, bonus token included. "
    "draft to host: ms per cycle; draft holds all that the drafter does. prefill: share of the wall time. "
    "identical: answers with the tokens of {base}'s in every repetition. "
    "slowest class: the class of questions with the least speedup, of more than one."
)
ACCEPTANCE_CAPTION = (
    "Share of the cycles that accepted a node of this depth, of those that drafted one and accepted one above. "
    "An adaptive tree has a level only where it may pay, which flatters: adaptive=false shows the drafter itself."
)
PEER_CAPTION = (
    "peers: same checkpoint (in the format named), prompt ids, threads and limits, in the same run, one question at a "
    "time. Their arithmetic differs, so identical is information; their prefill ends with the first token{sampling}."
)


def run_dicts(
    runs: Sequence[Run],
    *,
    temperature: float,
    floor_seconds: float | None = None,
    token_seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """One JSON object per run; all its numbers are of the repetition of median time.

    floor_seconds: what reading the weights once takes; `floor_fraction` is its share of a verification.
    token_seconds: what reading a cached token takes; `bandwidth_fraction` is the share of reading weights and cache in
    the time after the prompt.
    """
    bases = {run.batch: run for run in reversed(runs) if run.drafter == BASE and run.peer is None}
    peers = {run.peer: run.median.tokens_per_second for run in runs if run.peer}
    rows = []
    for run, label in zip(runs, short_labels([run.drafter for run in runs]), strict=True):
        tally, base = run.median, bases[run.batch]
        # What a peer spends its time on is not known, and a sequential cascade may do without cycles.
        ms = None if run.peer or not tally.passes else _ms_per_cycle(run)
        floored = floor_seconds and ms and ms["verify"]
        rivals = peers if run.peer is None and run.batch == 1 else {}
        speeds = [each.tokens_per_second for each in run.repetitions]
        rows.append(
            {
                "peer": run.peer,
                "drafter": run.drafter,
                "label": run.peer or label,
                "rule": run.rule,
                "temperature": temperature,
                "batch": run.batch,
                "tokens_per_second": tally.tokens_per_second,
                "tokens_per_second_spread": [min(speeds), max(speeds)],
                "speedup": tally.tokens_per_second / base.median.tokens_per_second,
                "speedup_over": {mode: tally.tokens_per_second / speed for mode, speed in rivals.items()},
                "tau": tally.tau,
                "acceptance_by_depth": tally.acceptance_by_depth,
                "level_acceptance": tally.level_acceptance,
                "level_cycles": tally.reached,
                "ms_per_cycle": ms,
                "identical": f"{sum(run.identical.values())}/{len(run.identical)}",
                "tokens": tally.tokens,
                "cycles": tally.cycles,
                "passes": tally.passes,
                "seconds": tally.seconds,
                "seconds_by_repetition": [each.seconds for each in run.repetitions],
                "prefill_seconds": tally.prefill_seconds,
                "bandwidth_fraction": _bandwidth(tally, floor_seconds, token_seconds),
                "floor_fraction": 1e3 * floor_seconds / ms["verify"] if floored else None,
                "by_class": _by_class(run, base),
            }
        )
    return rows


def _ms_per_cycle(run: Run) -> dict[str, float]:
    """By phase, with the prefill adding up to the wall time. Where cycles run on the device its clock tells the phases
    apart, and the host's share is the gap between two of them."""
    ms = run.median.ms_per_cycle
    if run.device_seconds is None:
        return ms
    phases = {phase: 1e3 * seconds for phase, seconds in run.device_seconds.items()}
    phases["draft"] += ms["draft"]  # of a drafter that drafts on the host, between two cycles
    return {**phases, "host": sum(ms.values()) - sum(phases.values())}


def _bandwidth(tally: Tally, floor_seconds: float | None, token_seconds: float) -> float | None:
    decoding = tally.seconds - tally.prefill_seconds
    if not floor_seconds or not tally.passes or decoding <= 0:
        return None
    return (tally.passes * floor_seconds + tally.cached_tokens * token_seconds) / decoding


def _by_class(run: Run, base: Run) -> dict[str, dict[str, Any]]:
    """Each class's repetition of median time, against the base's."""
    bases = base.median_by_class
    return {
        name: {
            "tokens_per_second": tally.tokens_per_second,
            "speedup": tally.tokens_per_second / bases[name].tokens_per_second,
            "tokens": tally.tokens,
            "seconds": tally.seconds,
        }
        for name, tally in run.median_by_class.items()
    }


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
    caption = CAPTION.format(base=BASE)
    if any(row["peer"] for row in rows):
        sampled = rows[0]["temperature"] > 0
        caption += " " + PEER_CAPTION.format(sampling="; they draw with their own samplers" if sampled else "")
    used = next((row["bandwidth_fraction"] for row in rows if row["drafter"] == BASE and not row["peer"]), None)
    caption += f" After the prompt, {BASE} reads weights and cache at {used:.0%} of the memory's speed." if used else ""
    out = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    widest = max(len(row["peer"] or "") for row in rows)
    out.add_column("drafter", overflow="fold", min_width=max(13, widest))
    for name in ("batch", "tokens/s", "speedup", "tau"):
        out.add_column(name, justify="right", no_wrap=True)
    for name in (*PHASES, "prefill", "identical"):
        out.add_column(name, justify="right", no_wrap=True)
    classes = any(len(row["by_class"]) > 1 for row in rows)
    if classes:
        out.add_column("slowest class")
    for row in rows:
        low, high = row["tokens_per_second_spread"]
        ms = row["ms_per_cycle"]
        out.add_row(
            row["label"],
            str(row["batch"]),
            f"{row['tokens_per_second']:.1f} ({low:.1f}-{high:.1f})",
            f"{row['speedup']:.2f}x",
            f"{row['tau']:.2f}" if row["tau"] else "",
            *(f"{ms[phase]:.2f}" if ms else "" for phase in PHASES),
            f"{row['prefill_seconds'] / row['seconds']:.0%}",
            row["identical"],
            *([_slowest(row["by_class"])] if classes else []),
        )
    return out


def acceptance_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The acceptance by depth of those of `run_dicts` that drafted."""
    title = {"title": "acceptance by depth", "title_justify": "left"}
    out = Table(**title, caption=ACCEPTANCE_CAPTION, caption_justify="left")
    out.add_column("drafter", overflow="fold", min_width=13)
    for name in ("batch", *map(str, range(1, DEPTHS + 1))):
        out.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        if shares := row["level_acceptance"]:
            cells = ("" if share is None else f"{share:.2f}" for share in shares[:DEPTHS])
            out.add_row(row["label"], str(row["batch"]), *cells)
    return out


def _slowest(classes: dict[str, dict[str, Any]]) -> str:
    if len(classes) < 2:
        return ""
    name = min(classes, key=lambda name: classes[name]["speedup"])
    return f"{classes[name]['speedup']:.2f}x {name}"


def peers_table(rows: Sequence[dict[str, Any]]) -> Table:
    """How many times as fast as each peer our drafters were: a row per drafter, a column per peer."""
    ours = [row for row in rows if row["speedup_over"]]
    out = Table(title="tokens/s over those of the peers", title_justify="left")
    out.add_column("drafter")
    for mode in ours[0]["speedup_over"]:
        out.add_column(mode, justify="right")
    for row in ours:
        out.add_row(row["label"], *(f"{ratio:.2f}x" for ratio in row["speedup_over"].values()))
    return out
