"""Published numbers beside measured ones. The published numbers are in data/published.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from specengine.bench.presets.catalog import PRESETS
from specengine.bench.race.contenders import BASE, CONTROL

PUBLISHED = Path(__file__).parents[1] / "data" / "published.json"


@cache
def published(preset: str) -> list[dict[str, Any]]:
    """Returns the rows of a preset in published.json, as dictionaries by column."""
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    return [row for row in rows if row["preset"] == preset]


def efficiency(speedup: Any, tau: Any) -> float | None:
    """Returns speedup over tau; None unless both are single numbers."""
    return speedup / tau if isinstance(speedup, int | float) and tau else None


def side_by_side(preset: str, model: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns published and measured numbers of a preset, paired by method and setting.

    rows: of `run_dicts`.
    The result has `rows` with `published` and `measured`, either of which may be None. Each published row and each
    contender occurs once; a published row is paired with the first contender of the same setting.
    `least` is the row of least speedup among entries that should never be slower, `control` the least and largest
    speedup of the control.
    """
    entries = PRESETS[preset].entries(model)
    methods = {(entry.drafter, entry.rule): entry.method for entry in entries}
    adaptive = {entry.drafter for entry in entries if entry.never_slower}
    unpaired = [_measured(row) for row in rows if row["peer"] is None and row["drafter"] not in (BASE, CONTROL)]
    lines = []
    for row in published(preset):
        measured = next((each for each in unpaired if _fits(row, each, methods)), None)
        unpaired = [each for each in unpaired if each is not measured]
        lines.append({"method": row["method"], "published": _published(row), "measured": measured})
    lines += [
        {"method": methods.get((each["drafter"], each["rule"]), ""), "published": None, "measured": each}
        for each in unpaired
    ]
    least = min((each for each in map(_measured, rows) if each["drafter"] in adaptive), key=_speed, default=None)
    control = sorted(row["speedup"] for row in rows if row["drafter"] == CONTROL)
    about = {"name": preset, "about": PRESETS[preset].about, "rows": lines, "least": least}
    return about | {"control": [control[0], control[-1]] if control else None}


def _fits(row: dict[str, Any], measured: dict[str, Any], methods: dict[tuple[str, str], str]) -> bool:
    settings = all(row[key] in (None, measured[key]) for key in ("temperature", "batch"))
    return settings and methods.get((measured["drafter"], measured["rule"])) == row["method"]


def _measured(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("label", "drafter", "rule", "temperature", "batch", "speedup", "tau", "agreement", "log_likelihood")
    return {key: row.get(key) for key in keys} | {"efficiency": efficiency(row["speedup"], row["tau"])}


def _published(row: dict[str, Any]) -> dict[str, Any]:
    numbers = {key: value for key, value in row.items() if key not in ("preset", "method")}
    return numbers | {"efficiency": efficiency(row["speedup"], row["tau"])}


def _speed(measured: dict[str, Any]) -> float:
    return measured["speedup"]
