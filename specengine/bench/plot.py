"""Pictures of recorded results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specengine.bench.rule_sweep import numbers
from specengine.bench.run import BASE
from specengine.rules import RULES

_MEASURES = (
    ("agreement", "tokens before the first that\ndiffers from the exact output"),
    ("log_likelihood", "log-likelihood of a token\nby the target, nats"),
)
_MARKERS = "osD^v<>pP*Xhd"  # not as many as colours: no two families share both
_COLORS = (
    "C0",
    "C1",
    "C2",
    "C3",
    "C4",
    "C5",
    "C6",
    "C8",
    "C9",
    "navy",
    "olive",
    "teal",
    "crimson",
    "goldenrod",
    "gray",
)


def check_matplotlib() -> None:
    """Raises ValueError where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("plot: needs matplotlib (pip install '.[plot]' in a clone)") from None


def plot_rules(results: dict[str, Any], path: Path) -> None:
    """Writes quality against speed as PNG: a row per measure, a column per drafter and temperature, a line per family
    of rules; plain decoding stands in every column."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = results["runs"]
    families = list(dict.fromkeys(row["family"] for row in runs))
    drafters = [name for name in dict.fromkeys(row["drafter"] for row in runs) if name != BASE] or [BASE]
    columns = [(drafter, row["temperature"]) for drafter in drafters for row in runs if row["drafter"] == BASE]
    figure = Figure(figsize=(2.5 + 4.6 * len(columns), 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(_MEASURES), len(columns), squeeze=False, sharex="col", sharey="row")
    for (measure, label), line in zip(_MEASURES, panels, strict=True):
        for (drafter, temperature), panel in zip(columns, line, strict=True):
            for number, family in enumerate(families):
                rows = [row for row in runs if (row["family"], row["temperature"]) == (family, temperature)]
                _draw(panel, [row for row in rows if row["drafter"] in (BASE, drafter)], measure, number, family)
            panel.grid(alpha=0.3)
            panel.margins(0.08)
        line[0].set_ylabel(label)
    for (drafter, temperature), panel in zip(columns, panels[0], strict=True):
        panel.set_title(f"{drafter}\ntemperature {temperature:g}", fontsize="medium")
    for panel in panels[-1]:
        panel.set_xlabel(f"speedup over {BASE}")
    what = f"{results['model']}, {results['questions']} questions, {results['max_new_tokens']} new tokens"
    figure.suptitle(f"Rules: quality against speed ({what})")
    handles = {h.get_label(): h for row in panels for panel in row for h in panel.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def _draw(panel: Any, rows: list[dict[str, Any]], measure: str, number: int, family: str) -> None:
    """One family's points in the order measured, its first and last parameters named."""
    if not rows:
        return
    name = family.partition(":")[0]
    lossless = name in RULES and RULES[name].lossless
    color = "black" if lossless else _COLORS[number % len(_COLORS)]
    style = {"color": color, "linestyle": "none" if lossless else "-", "marker": _MARKERS[number % len(_MARKERS)]}
    speeds, values = [row["speedup"] for row in rows], [row[measure] for row in rows]
    panel.plot(speeds, values, label=family, markersize=5, alpha=0.8, **style)
    if len(rows) > 1 and not lossless:
        for row, up in ((rows[0], 4), (rows[-1], -9)):
            at, style = (row["speedup"], row[measure]), {"fontsize": 7, "color": color}
            panel.annotate(numbers(row["rule"]), at, xytext=(3, up), textcoords="offset points", **style)
