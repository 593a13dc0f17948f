"""Results as JSON values, and as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specengine.bench.race.latency import latency_dict
from specengine.bench.race.run import BASE, Run
from specengine.bench.race.run_stats import Tally
from specengine.bench.report.labels import short_labels
from specengine.utils.atomic_file import atomic_file


def run_dicts(
    runs: Sequence[Run],
    *,
    floor_seconds: float | None = None,
    token_seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """One JSON object per run; all its numbers are of the repetition of median time.

    floor_seconds: what reading the weights once takes; `floor_fraction` is its share of a verification.
    token_seconds: what reading a cached token takes; `bandwidth_fraction` is the share of reading weights and cache in
    the time after the prompt.
    """
    bases = {(run.temperature, run.batch): run for run in reversed(runs) if run.drafter == BASE and run.peer is None}
    peers = [run for run in runs if run.peer]
    rows = []
    for run, label in zip(runs, short_labels([run.drafter for run in runs]), strict=True):
        tally, base = run.median, bases[run.temperature, run.batch]
        # What a peer spends its time on is not known, and a sequential cascade may do without cycles.
        ms = None if run.peer or not tally.passes else _ms_per_cycle(run)
        verify = ms["verify"] if ms else 0.0
        rivals = [each for each in peers if (run.peer, run.batch, run.temperature) == (None, 1, each.temperature)]
        speeds = [each.tokens_per_second for each in run.repetitions]
        rows.append(
            {
                "peer": run.peer,
                "drafter": run.drafter,
                "label": run.peer or label,
                "rule": run.rule,
                "temperature": run.temperature,
                "batch": run.batch,
                "tokens_per_second": tally.tokens_per_second,
                "tokens_per_second_spread": [min(speeds), max(speeds)],
                "speedup": tally.tokens_per_second / base.median.tokens_per_second,
                "speedup_over": {each.peer: tally.tokens_per_second / each.median.tokens_per_second for each in rivals},
                "tau": tally.tau,
                "acceptance_by_depth": tally.acceptance_by_depth,
                "level_acceptance": tally.level_acceptance,
                "level_cycles": tally.reached,
                "ms_per_cycle": ms,
                **latency_dict(tally.first_tokens, tally.gaps),
                "peak_memory_bytes": run.peak_memory,
                "identical": f"{sum(run.identical.values())}/{len(run.identical)}",
                "tokens": tally.tokens,
                "cycles": tally.cycles,
                "passes": tally.passes,
                "seconds": tally.seconds,
                "seconds_by_repetition": [each.seconds for each in run.repetitions],
                "prefill_seconds": tally.prefill_seconds,
                "bandwidth_fraction": _bandwidth(tally, floor_seconds, token_seconds),
                "floor_fraction": 1e3 * floor_seconds / verify if floor_seconds and verify else None,
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
    write_whole(path, (_spelled(data) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Puts a file in place at once: a kill at any moment leaves the one before. Raises OSError."""
    with atomic_file(path) as part:
        part.write_bytes(content)


def _spelled(value: Any, indent: str = "") -> str:
    """JSON with a line per entry, but lists without dictionaries on one line: tokens would be pages else."""
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(str(key))}: {_spelled(each, indent + '  ')}" for key, each in value.items()]
    elif isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
        entries = [_spelled(each, indent + "  ") for each in value]
    else:
        return json.dumps(value)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + ",".join(f"\n{indent}  {entry}" for entry in entries) + f"\n{indent}{closing}"
