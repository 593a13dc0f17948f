"""What the pictures of recorded results share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^v<>pP*Xhd"  # not as many as colours: no two lines share both
COLORS = (
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


def new_figure(width: float, height: float, title: str, results: dict[str, Any]) -> Figure:
    """An empty one of so many inches, which says what was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    what = f"{results['model']}, {results['questions']} questions, {results['max_new_tokens']} new tokens"
    figure.suptitle(f"{title} ({what})")
    return figure


def style(number: int) -> dict[str, Any]:
    """Colour and marker of a line by its number."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110, format="png")
