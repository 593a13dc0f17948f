"""Plots a training run: loss per level, and acceptance on held-out text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specengine.train.run_log import read_log

_MOST_POINTS = 200  # of a loss curve, about


def plot_training(log: Path, picture: Path) -> None:
    """Writes a PNG of training.jsonl. Raises ModuleNotFoundError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_log(log)
    steps = [line for line in lines if "held_out" not in line]
    tests = [{"tokens": line["tokens"], **line["held_out"]} for line in lines if "held_out" in line]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, taken = figure.subplots(1, 2)
    _levels(losses, _averaged(steps, "loss"), "loss", "-", 0.9)
    _levels(losses, tests, "loss", "o", 0.9, labelled=False)
    losses.set(title="loss per level (dots: held out)", xlabel="tokens", ylabel="loss", yscale="log")
    _levels(taken, tests, "acceptance", "o-", 0.9)
    taken.set(title="held-out acceptance, given all levels above", xlabel="tokens", ylim=(0, 1))
    for panel in (losses, taken):
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    figure.savefig(picture, dpi=120, format="png")


def _levels(panel: Any, lines: list[dict], key: str, style: str, alpha: float, labelled: bool = True) -> None:
    for level in range(len(lines[0][key]) if lines else 0):
        label = f"level {level + 1}" if labelled else None
        values = [line[key][level] for line in lines]
        panel.plot(
            [line["tokens"] for line in lines], values, style, c=f"C{level % 10}", ms=3, alpha=alpha, label=label
        )


def _averaged(steps: list[dict], key: str) -> list[dict]:
    """Averages neighbouring steps."""
    width = max(1, len(steps) // _MOST_POINTS)
    groups = [steps[i : i + width] for i in range(0, len(steps), width)]
    return [
        {
            "tokens": group[-1]["tokens"],
            key: [sum(level) / len(group) for level in zip(*(s[key] for s in group), strict=True)],
        }
        for group in groups
    ]
