"""Picture of a comparison of drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specengine.bench.race.contenders import BASE
from specengine.bench.report.plot import new_figure, style, wrapped
from specengine.bench.report.tables import DEPTHS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CYCLES = 20  # a share of fewer cycles is noise
_PHASES = {"draft": ("draft",), "verify": ("verify",), "rest": ("accept", "compact", "host")}
_PHASE_COLORS = {"draft": "#e08a3c", "verify": "#5b7fa6", "rest": "#bdbdbd"}


def drafters_figure(results: dict[str, Any]) -> Figure:
    """Draws acceptance by depth, tau and speedup, and the time of a cycle.

    There is a row of panels per temperature and batch size.
    """
    settings = list(dict.fromkeys((row["temperature"], row["batch"]) for row in results["runs"]))
    lines = [[row for row in results["runs"] if (row["temperature"], row["batch"]) == each] for each in settings]
    height = max(3.4, 1.3 + 0.5 * max(map(len, lines)))
    figure = new_figure(15, 0.8 + height * len(lines), "Drafters", results)
    panels = figure.subplots(len(lines), 3, squeeze=False, width_ratios=(1.15, 1, 1))
    looks: dict[str, dict[str, Any]] = {}  # by label, the same style in every row
    for label in (row["label"] for row in results["runs"] if row["level_acceptance"]):
        looks.setdefault(label, style(len(looks)))
    for (temperature, batch), rows, (depths, gains, cycles) in zip(settings, lines, panels, strict=True):
        setting = f"temperature {temperature:g}" + (f", batch {batch}" if len({b for _, b in settings}) > 1 else "")
        depths.set_title(f"acceptance by depth, {setting}", fontsize="medium")
        gains.set_title(f"tau (dark) and speedup over {BASE} (pale)", fontsize="medium")
        cycles.set_title("ms per cycle", fontsize="medium")
        _draw_depths(depths, rows, looks)
        _draw_gains(gains, rows, looks)
        _draw_cycles(cycles, rows)
        cycles.tick_params(labelleft=False)  # the panel to the left has the same names
    for side, column, count in (("left", 0, 2), ("right", 2, 3)):
        handles = {h.get_label(): h for line in panels for h in line[column].get_legend_handles_labels()[0]}
        if handles:  # below the panels, where no line crosses it
            names = [wrapped(name, 60) for name in handles]
            place: dict[str, Any] = {"loc": f"outside lower {side}"}
            figure.legend([*handles.values()], names, ncols=count, fontsize="small", **place)
    return figure


def _draw_depths(panel: Any, rows: list[dict[str, Any]], looks: dict[str, dict[str, Any]]) -> None:
    """Draws the share of levels that were accepted once the level above was."""
    for row in rows:
        found = zip(row["level_acceptance"], row["level_cycles"], range(1, DEPTHS + 1), strict=False)
        points = [(depth, share) for share, cycles, depth in found if cycles >= _CYCLES]
        if points:
            panel.plot(*zip(*points, strict=True), label=row["label"], markersize=5, alpha=0.8, **looks[row["label"]])
    panel.set(
        xlabel="depth",
        ylabel="accepted once the level above was",
        xticks=range(1, DEPTHS + 1),
        xlim=(0.7, DEPTHS + 0.3),
        ylim=(-0.03, 1.03),  # whole markers at both ends
    )
    panel.grid(alpha=0.3)


def _draw_gains(panel: Any, rows: list[dict[str, Any]], looks: dict[str, dict[str, Any]]) -> None:
    for place, row in enumerate(rows):
        color = looks.get(row["label"], {"color": "dimgray"})["color"]
        for measure, shift, alpha in (("tau", -0.2, 1.0), ("speedup", 0.2, 0.45)):
            if row[measure]:
                bar = panel.barh(place + shift, row[measure], 0.38, color=color, alpha=alpha)
                panel.bar_label(bar, fmt="%.2f", padding=3, fontsize="small", bbox={"color": "white", "pad": 0.5})
    panel.axvline(1, color="black", linewidth=0.8, linestyle=":")
    _label_bars(panel, rows)


def _draw_cycles(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Draws the phases of a cycle; a peer reports none."""
    timed = [(place, row["ms_per_cycle"]) for place, row in enumerate(rows) if row["ms_per_cycle"]]
    places = [place for place, _ in timed]
    ends = [0.0] * len(timed)
    for part, phases in _PHASES.items():
        spent = [sum(ms[phase] for phase in phases) for _, ms in timed]
        bars = panel.barh(places, spent, 0.6, left=ends, label=part, color=_PHASE_COLORS[part])
        ends = [end + ms for end, ms in zip(ends, spent, strict=True)]
    panel.bar_label(bars, [f"{end:.1f}" for end in ends], padding=2, fontsize="small")
    _label_bars(panel, rows)


def _label_bars(panel: Any, rows: list[dict[str, Any]]) -> None:
    """Puts each drafter left of its bar, the first one on top, and leaves space for numbers right of the bars."""
    panel.set_yticks(range(len(rows)), [wrapped(row["label"], 30) for row in rows], fontsize="small")
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.margins(x=0.18)
    panel.grid(axis="x", alpha=0.3)
