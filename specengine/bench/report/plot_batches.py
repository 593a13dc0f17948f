"""Picture of speedups by batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specengine.bench.race.contenders import BASE
from specengine.bench.report.plot import legend_below, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = 16


def batches_figure(results: dict[str, Any]) -> Figure | None:
    """Draws a line per contender at the first temperature. Returns None for runs of one batch size."""
    rows = [row for row in results["runs"] if row["temperature"] == results["runs"][0]["temperature"]]
    rows = [row for row in rows if row["drafter"] != BASE and not row["peer"] and row["rule"] == rows[0]["rule"]]
    batches = sorted({row["batch"] for row in rows})
    if len(batches) < 2:
        return None
    figure = new_figure(9, 5, "Batches", results)
    panel = figure.subplots()
    for number, label in enumerate(list(dict.fromkeys(row["label"] for row in rows))[:_LINES]):
        points = sorted((row["batch"], row["speedup"]) for row in rows if row["label"] == label)
        panel.plot(*zip(*points, strict=True), label=label, markersize=5, alpha=0.8, **style(number))
    panel.axhline(1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xticks(batches, map(str, batches))
    panel.set(
        xlabel="requests that share a cycle", ylabel=f"speedup over {BASE} of the same batch size", ylim=(0, None)
    )
    panel.grid(alpha=0.3)
    legend_below(figure)
    return figure
