"""What the pictures of recorded results share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specengine.bench.report.json import write_whole
from specengine.bench.report.labels import counted

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
    what = f"{results['model']}, {counted(results['questions'], 'question')}, {results['max_new_tokens']} new tokens"
    figure.suptitle(f"{title} ({what})")
    return figure


def legend_below(figure: Figure) -> None:
    """One of all its panels, in which nothing stands twice."""
    handles = {str(h.get_label()): h for panel in figure.axes for h in panel.get_legend_handles_labels()[0]}
    names = [wrapped(name, 40) for name in handles]
    inches = 0.6 + 0.075 * max((len(line) for name in names for line in name.split("\n")), default=0)
    columns = max(1, min(3, len(names), int(figure.get_figwidth() / inches)))
    lines = sum(sorted((name.count("\n") + 1 for name in names), reverse=True)[: -(-len(names) // columns)])
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)  # the panels keep theirs
    figure.legend([*handles.values()], names, loc="outside lower center", ncols=columns, fontsize="small")


def wrapped(label: str, width: int) -> str:
    """In lines of about so many characters, broken behind commas."""
    lines = [""]
    for piece in label.replace(",", ",\n").split("\n"):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def printable(text: str) -> str:
    """Without characters that no font has a shape for."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def picture(draw: Callable[[dict[str, Any]], Figure | None], results: dict[str, Any]) -> bytes | None:
    """The PNG of what `draw` makes of results; None where that is nothing."""
    import matplotlib

    out = BytesIO()
    # Names come from files: a dollar sign in one is no formula. A box stands for a character that the font lacks.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        if (figure := draw(results)) is None:
            return None
        figure.savefig(out, dpi=110, format="png")
    return out.getvalue()


def style(number: int) -> dict[str, Any]:
    """Colour and marker of a line by its number."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def save(draw: Callable[[dict[str, Any]], Figure | None], results: dict[str, Any], path: Path) -> None:
    """Writes a picture as PNG."""
    write_whole(path, picture(draw, results) or b"")
