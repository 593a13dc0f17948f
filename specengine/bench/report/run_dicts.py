"""Runs as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specengine.bench.race.contenders import BASE
from specengine.bench.race.latency import latency_dict
from specengine.bench.race.run import Run
from specengine.bench.race.run_stats import RunStats
from specengine.bench.report.labels import short_labels


def run_dicts(
    runs: Sequence[Run],
    *,
    floor_seconds: float | None = None,
    token_seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """Returns one JSON object per run, with the numbers of the repetition of median time.

    floor_seconds: time to read the weights once; `floor_fraction` is its share of a verification.
    token_seconds: time to read a cached token; `bandwidth_fraction` is the share of reading weights and cache in the
    time after the prefill.
    """
    bases = {(run.temperature, run.batch): run for run in reversed(runs) if run.drafter == BASE and run.peer is None}
    peers = [run for run in runs if run.peer]
    rows = []
    for run, label in zip(runs, short_labels([run.drafter for run in runs]), strict=True):
        stats = run.median
        base = bases[run.temperature, run.batch]
        # A peer reports no phases, and a sequential cascade may take no cycle.
        ms = None if run.peer or not stats.passes else _ms_per_cycle(run)
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
                "tokens_per_second": stats.tokens_per_second,
                "tokens_per_second_spread": [min(speeds), max(speeds)],
                "speedup": stats.tokens_per_second / base.median.tokens_per_second,
                "speedup_over": {each.peer: stats.tokens_per_second / each.median.tokens_per_second for each in rivals},
                "tau": stats.tau,
                "acceptance_by_depth": stats.acceptance_by_depth,
                "level_acceptance": stats.level_acceptance,
                "level_cycles": stats.reached,
                "ms_per_cycle": ms,
                **latency_dict(stats.first_tokens, stats.gaps),
                "peak_memory_bytes": run.peak_memory,
                "identical": f"{sum(run.identical.values())}/{len(run.identical)}",
                "tokens": stats.tokens,
                "cycles": stats.cycles,
                "passes": stats.passes,
                "seconds": stats.seconds,
                "seconds_by_repetition": [each.seconds for each in run.repetitions],
                "prefill_seconds": stats.prefill_seconds,
                "bandwidth_fraction": _bandwidth(stats, floor_seconds, token_seconds),
                "floor_fraction": 1e3 * floor_seconds / verify if floor_seconds and verify else None,
                "by_class": _by_class(run, base),
                "expert_passes": run.expert_passes,
            }
        )
    return rows


def _ms_per_cycle(run: Run) -> dict[str, float]:
    """Returns milliseconds by phase, which add up to the wall time with the prefill.

    For cycles on the device its clock measures the phases, and `host` is the gap between two cycles.
    """
    ms = run.median.ms_per_cycle
    if run.device_seconds is None:
        return ms
    phases = {phase: 1e3 * seconds for phase, seconds in run.device_seconds.items()}
    phases["draft"] += ms["draft"]  # of a drafter that drafts on the host between two cycles
    return {**phases, "host": sum(ms.values()) - sum(phases.values())}


def _bandwidth(stats: RunStats, floor_seconds: float | None, token_seconds: float) -> float | None:
    decoding = stats.seconds - stats.prefill_seconds
    if not floor_seconds or not stats.passes or decoding <= 0:
        return None
    return (stats.passes * floor_seconds + stats.cached_tokens * token_seconds) / decoding


def _by_class(run: Run, base: Run) -> dict[str, dict[str, Any]]:
    """Returns the repetition of median time of each class, and its speedup over plain decoding."""
    bases = base.median_by_class
    return {
        name: {
            "tokens_per_second": stats.tokens_per_second,
            "speedup": stats.tokens_per_second / bases[name].tokens_per_second,
            "tokens": stats.tokens,
            "seconds": stats.seconds,
        }
        for name, stats in run.median_by_class.items()
    }
