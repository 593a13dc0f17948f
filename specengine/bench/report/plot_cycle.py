"""Picture of one cycle: its phases in order, and the tokens that it generates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specengine.bench.report.plot import new_figure, wrapped
from specengine.types import PHASES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = dict(zip(PHASES, ("#e08a3c", "#5b7fa6", "#7a9e5f", "#b0628a", "#bdbdbd"), strict=True))
_LINES = 16


def cycle_figure(results: dict[str, Any]) -> Figure | None:
    """Draws a bar per contender at the first temperature and batch size. Returns None for runs without phases."""
    timed = [row for row in results["runs"] if row["ms_per_cycle"] and row["tau"]]
    timed = [row for row in timed if all(row[key] == timed[0][key] for key in ("temperature", "batch"))][:_LINES]
    if not timed:
        return None
    figure = new_figure(11, 1.6 + 0.55 * len(timed), "One cycle", results)
    panel = figure.subplots()
    for place, row in enumerate(timed):
        begin = 0.0
        for phase in PHASES:
            spent = max(0.0, row["ms_per_cycle"][phase])
            label = phase if place == 0 else None
            panel.barh(
                place, spent, 0.6, left=begin, color=_COLORS[phase], label=label, edgecolor="white", linewidth=0.4
            )
            begin += spent
        each = f" {row['tau']:.2f} tokens, {begin / row['tau']:.2f} ms each"
        panel.text(begin, place, each, va="center", fontsize="small")
    panel.set_yticks(range(len(timed)), [wrapped(row["label"], 34) for row in timed], fontsize="small")
    panel.set_ylim(len(timed) - 0.4, -0.6)
    panel.set_xlabel(f"ms since the cycle began (temperature {timed[0]['temperature']:g}, batch {timed[0]['batch']})")
    panel.margins(x=0.28)
    panel.set_xlim(left=0)
    panel.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(PHASES), fontsize="small")
    return figure
