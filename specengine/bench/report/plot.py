"""Parts that all pictures of recorded results share: figures, legends, styles, PNG files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specengine.bench.report.labels import counted
from specengine.bench.report.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^v<>pP*Xhd"  # 13, and 15 colours: no two of 195 lines share both
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
    """Raises ValueError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError("plot: needs matplotlib (pip install '.[plot]' in a clone)") from None


def new_figure(width: float, height: float, title: str, results: dict[str, Any]) -> Figure:
    """Returns an empty figure, sizes in inches, with model, questions and tokens in its title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    run = f"{results['model']}, {counted(results['questions'], 'question')}, {results['max_new_tokens']} new tokens"
    figure.suptitle(f"{title} ({run})")
    return figure


def legend_below(figure: Figure) -> None:
    """Draws one legend for all panels, without duplicates."""
    handles = {str(h.get_label()): h for panel in figure.axes for h in panel.get_legend_handles_labels()[0]}
    names = [wrapped(name, 40) for name in handles]
    inches = 0.6 + 0.075 * max((len(line) for name in names for line in name.split("\n")), default=0)
    columns = max(1, min(3, len(names), int(figure.get_figwidth() / inches)))
    lines = sum(sorted((name.count("\n") + 1 for name in names), reverse=True)[: -(-len(names) // columns)])
    figure.set_figheight(figure.get_figheight() + 0.2 * lines)  # the panels keep their height
    figure.legend([*handles.values()], names, loc="outside lower center", ncols=columns, fontsize="small")


def wrapped(label: str, width: int) -> str:
    """Breaks a label after commas into lines of about `width` characters."""
    lines = [""]
    for piece in label.replace(",", ",\n").split("\n"):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def printable(text: str) -> str:
    """Returns a text without unprintable characters."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)


def picture(draw: Callable[[dict[str, Any]], Figure | None], results: dict[str, Any]) -> bytes | None:
    """Returns the PNG of the figure that `draw` makes; None if it makes none."""
    import matplotlib
    from PIL import Image  # which matplotlib needs

    out = BytesIO()
    # Names come from files, so a dollar sign is text. The font draws a box for a character that it lacks.
    with matplotlib.rc_context({"text.parse_math": False}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        if (figure := draw(results)) is None:
            return None
        figure.savefig(out, dpi=110, format="png")
    small = BytesIO()
    Image.open(out).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return small.getvalue()


def style(number: int) -> dict[str, Any]:
    """Returns colour and marker of a line by its number."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def save(draw: Callable[[dict[str, Any]], Figure | None], results: dict[str, Any], path: Path) -> None:
    """Writes a picture as a PNG file. Raises OSError."""
    write_whole(path, picture(draw, results) or b"")
