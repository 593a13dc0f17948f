"""Picture of a comparison of rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specengine.bench.race.contenders import BASE
from specengine.bench.race.rule_sweep import numbers
from specengine.bench.report.plot import new_figure, style
from specengine.rules import RULES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 12
_MEASURES = (
    ("agreement", "tokens before the first that\ndiffers from the exact output"),
    ("log_likelihood", "log-likelihood of a token\nby the target, nats"),
)


def rules_figure(results: dict[str, Any]) -> Figure | None:
    """Draws quality against speed at the first batch size. Returns None for runs without quality.

    There is a row of panels per measure, a column per drafter and temperature, and a line per family of rules. Plain
    decoding is in every panel.
    """
    runs = [row for row in results["runs"] if row["family"] and row["agreement"] is not None]
    runs = [row for row in runs if row["log_likelihood"] is not None and row["batch"] == runs[0]["batch"]]
    if not any(row["drafter"] == BASE for row in runs):
        return None
    families = list(dict.fromkeys(row["family"] for row in runs))
    drafters = [name for name in dict.fromkeys(row["drafter"] for row in runs) if name != BASE] or [BASE]
    labels = {row["drafter"]: row["label"] for row in runs}
    columns = [(drafter, row["temperature"]) for drafter in drafters for row in runs if row["drafter"] == BASE]
    columns = columns[:_COLUMNS]
    figure = new_figure(2.5 + 4.6 * len(columns), 9.5, "Rules: quality against speed", results)
    panels = figure.subplots(len(_MEASURES), len(columns), squeeze=False, sharex="col", sharey="row")
    for (measure, label), line in zip(_MEASURES, panels, strict=True):
        for (drafter, temperature), panel in zip(columns, line, strict=True):
            for number, family in enumerate(families):
                rows = [row for row in runs if (row["family"], row["temperature"]) == (family, temperature)]
                _draw(panel, [row for row in rows if row["drafter"] == drafter != BASE], measure, number, family)
            plain = next(row for row in runs if (row["drafter"], row["temperature"]) == (BASE, temperature))
            panel.plot(plain["speedup"], plain[measure], "k*", markersize=9, label=BASE)
            panel.grid(alpha=0.3)
            panel.margins(0.08)
        line[0].set_ylabel(label)
    for (drafter, temperature), panel in zip(columns, panels[0], strict=True):
        panel.set_title(f"{labels[drafter]}\ntemperature {temperature:g}", fontsize="medium")
    for panel in panels[-1]:
        panel.set_xlabel(f"speedup over {BASE}")
    handles = {h.get_label(): h for row in panels for panel in row for h in panel.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")
    figure.draw_without_rendering()  # places the texts
    for panel in panels.flat:
        _drop_covered(panel)
    return figure


def _drop_covered(panel: Any) -> None:
    """Removes parameters that overlap others."""
    placed: list[Any] = []
    for text in list(panel.texts):
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in placed):
            text.remove()
        else:
            placed.append(box)


def _draw(panel: Any, rows: list[dict[str, Any]], measure: str, number: int, family: str) -> None:
    """Draws the points of one family in the order measured, and writes its first and last parameters."""
    if not rows:
        return
    name = family.partition(":")[0]
    lossless = name in RULES and RULES[name].lossless
    look = style(number) | ({"color": "black", "linestyle": "none"} if lossless else {})
    speeds = [row["speedup"] for row in rows]
    values = [row[measure] for row in rows]
    panel.plot(speeds, values, label=family, markersize=5, alpha=0.8, **look)
    if len(rows) > 1 and not lossless:
        for row, up in ((rows[0], 4), (rows[-1], -9)):
            at = (row["speedup"], row[measure])
            font = {"fontsize": 7, "color": look["color"], "zorder": 5}
            font["bbox"] = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.5}  # markers lie close
            panel.annotate(numbers(row["rule"]), at, xytext=(3, up), textcoords="offset points", **font)
