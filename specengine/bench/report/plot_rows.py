"""Picture of the time of a pass by its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specengine.bench.report.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BOX = {"color": "white", "pad": 0.6, "alpha": 0.85}  # of a number that a line crosses


def rows_figure(results: dict[str, Any]) -> Figure | None:
    """Draws milliseconds of a target pass by the rows that it verifies. Returns None for fewer than two sizes."""
    rows = sorted(results["rows"], key=lambda row: row["rows"])
    if len(rows) < 2:
        return None
    counts = [row["rows"] for row in rows]
    spent = [row["ms"] for row in rows]
    figure = new_figure(8, 4.6, "One pass by its rows", results)
    panel = figure.subplots()
    panel.plot(counts, [spent[0] * count / counts[0] for count in counts], ":", color="gray", label="a pass per row")
    panel.plot(counts, [spent[0]] * len(counts), "--", color="gray", label="free")
    panel.plot(counts, spent, "o-", color="C0", label="measured")
    for count, ms in zip(counts, spent, strict=True):
        shown = f"{ms:.2f} ms, {ms / spent[0]:.2f}x"
        # Below and right of a point, away from the curve.
        panel.annotate(shown, (count, ms), xytext=(5, -12), textcoords="offset points", fontsize="small", bbox=_BOX)
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, map(str, counts))
    panel.minorticks_off()
    panel.set(xlabel="rows (nodes of the tree, root included)", ylabel="ms of a pass", ylim=(0, 1.35 * max(spent)))
    panel.set_xlim(counts[0] / 1.15, counts[-1] * 2.1)
    panel.grid(alpha=0.3)
    panel.legend(loc="upper left", fontsize="small")
    return figure
