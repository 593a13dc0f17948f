"""Picture of speedups by kind of question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specengine.bench.race.contenders import BASE
from specengine.bench.report.plot import legend_below, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CONTENDERS = 12  # bars of a group
_CLASSES = 16  # groups


def tasks_figure(results: dict[str, Any]) -> Figure | None:
    """Draws bars by class of question at the first batch size, a panel per temperature. Returns None for one class."""
    runs = [row for row in results["runs"] if len(row["by_class"]) > 1]
    runs = [row for row in runs if row["batch"] == runs[0]["batch"] and (row["drafter"] != BASE or row["peer"])]
    if not runs:
        return None
    temperatures = list(dict.fromkeys(row["temperature"] for row in runs))
    groups = [[row for row in runs if row["temperature"] == each][:_CONTENDERS] for each in temperatures]
    classes = list(dict.fromkeys(name for row in runs for name in row["by_class"]))[:_CLASSES]
    bars = max(map(len, groups))
    figure = new_figure(
        min(24, max(8, 1.5 + _classes_width(len(classes), bars))), 0.8 + 3.6 * len(groups), "Tasks", results
    )
    for temperature, rows, (panel,) in zip(
        temperatures, groups, figure.subplots(len(groups), 1, squeeze=False), strict=True
    ):
        width = 0.84 / len(rows)
        for number, row in enumerate(rows):
            places = [i - 0.42 + (number + 0.5) * width for i, name in enumerate(classes) if name in row["by_class"]]
            speeds = [row["by_class"][name]["speedup"] for name in classes if name in row["by_class"]]
            panel.bar(places, speeds, 0.92 * width, label=row["label"], color=style(number)["color"])
        panel.axhline(1, color="black", linewidth=0.8, linestyle=":")
        panel.set_title(f"speedup over {BASE} by kind of question, temperature {temperature:g}", fontsize="medium")
        panel.set_xticks(
            range(len(classes)),
            classes,
            rotation=20 if len(classes) > 6 else 0,
            ha="right" if len(classes) > 6 else "center",
        )
        panel.set(ylabel="speedup", xlim=(-0.5, len(classes) - 0.5))
        panel.grid(axis="y", alpha=0.3)
    legend_below(figure)
    return figure


def _classes_width(classes: int, bars: int) -> float:
    """Returns the width of all groups in inches."""
    return classes * max(0.9, 0.17 * bars)
