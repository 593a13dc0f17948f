"""Pictures of recorded results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specengine.bench.rule_sweep import numbers
from specengine.rules import RULES

_MEASURES = (
    ("agreement", "tokens before the first that\ndiffers from the exact output"),
    ("log_likelihood", "log-likelihood of a token\nby the target, nats"),
)
_MARKERS = "osD^v<>pP*XhH8d"
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
    """Writes quality against speed as PNG: a row per measure, a column per temperature, a line per rule family."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = results["runs"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in runs))
    families = list(dict.fromkeys(row["family"] for row in runs))
    figure = Figure(figsize=(2.5 + 5.5 * len(temperatures), 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(_MEASURES), len(temperatures), squeeze=False, sharex="col", sharey="row")
    for line, (measure, label) in enumerate(_MEASURES):
        for column, temperature in enumerate(temperatures):
            panel = panels[line][column]
            for number, family in enumerate(families):
                rows = [row for row in runs if (row["family"], row["temperature"]) == (family, temperature)]
                _draw(panel, rows, measure, number, family)
            panel.grid(alpha=0.3)
            panel.margins(0.08)
            if line == 0:
                panel.set_title(f"temperature {temperature:g}")
            if column == 0:
                panel.set_ylabel(label)
    for panel in panels[-1]:
        panel.set_xlabel("speedup over plain decoding")
    what = f"{results['model']}, {results['questions']} questions, {results['max_new_tokens']} new tokens"
    figure.suptitle(f"Rules: quality against speed\n{what}")
    handles = {h.get_label(): h for row in panels for panel in row for h in panel.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def _draw(panel: Any, rows: list[dict[str, Any]], measure: str, number: int, family: str) -> None:
    """One family's points in the order measured, its first and last parameters named."""
    name = family.partition(":")[0]
    lossless = name in RULES and RULES[name].lossless
    speeds, values = [row["speedup"] for row in rows], [row[measure] for row in rows]
    color = "black" if lossless else _COLORS[number % len(_COLORS)]
    style = {"color": color, "linestyle": "none" if lossless else "-", "marker": _MARKERS[number % len(_MARKERS)]}
    panel.plot(speeds, values, label=family, markersize=5, alpha=0.8, **style)
    if len(rows) > 1 and not lossless:
        for row, up in ((rows[0], 4), (rows[-1], -9)):
            at = (row["speedup"], row[measure])
            panel.annotate(
                numbers(row["rule"]), at, xytext=(3, up), textcoords="offset points", fontsize=7, color=color
            )
