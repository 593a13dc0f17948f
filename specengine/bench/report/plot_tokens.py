"""Picture of an answer: each token has the colour of the drafter that proposed it; tokens of the target have none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specengine.bench.race.token_sources import TARGET
from specengine.bench.report.plot import COLORS, printable, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 96  # characters of a line
_LINES = 12  # of an answer
_ANSWERS = 12
_CHARACTER, _LINE = 0.085, 0.24  # inches


def tokens_figure(results: dict[str, Any]) -> Figure | None:
    """Draws the answers of the example. Returns None if none was recorded."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    answers = {label: _layout(pieces) for label, pieces in results["example"]["tokens"].items() if pieces}
    answers = dict(list(answers.items())[:_ANSWERS])
    if not answers:
        return None
    sources = dict.fromkeys(source for pieces in answers.values() for _, _, _, source in pieces if source != TARGET)
    colors = {source: COLORS[number % len(COLORS)] for number, source in enumerate(sources)}
    lines = sum(_height(pieces) + 2 for pieces in answers.values())
    keys = _legend_lines([TARGET, *sources])
    width, height = _COLUMNS + 2, lines + len(keys) + 2
    figure = Figure(figsize=(width * _CHARACTER, height * _LINE))
    FigureCanvasAgg(figure)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(-1, width - 1), ylim=(height, 0))
    panel.axis("off")
    question = printable(results["example"]["question"] or "")
    panel.text(0, 0.8, f"Who drafted which token (question {question})", fontsize=11, va="center")
    for line, names in enumerate(keys):
        for column, name in names:
            _token(panel, column, 1.9 + line, name, colors.get(name))
    top = 2.4 + len(keys)
    for label, pieces in answers.items():
        drafted = sum(source != TARGET for *_, source in pieces)
        title = f"{label}: {drafted} of the first {len(pieces)} tokens were drafted"
        panel.text(0, top + 0.4, wrapped(printable(title), 200), fontsize=9, weight="bold", va="center")
        for column, line, text, source in pieces:
            _token(panel, column, top + 1.4 + line, text, colors.get(source))
        top += _height(pieces) + 2
    return figure


def _token(panel: Any, column: float, line: float, text: str, color: str | None) -> None:
    """Draws a box as wide as its text; a token of the target has a thin frame and no colour."""
    from matplotlib.patches import Rectangle

    face = (
        {"facecolor": color, "alpha": 0.35, "linewidth": 0} if color else {"facecolor": "white", "edgecolor": "silver"}
    )
    panel.add_patch(Rectangle((column + 0.06, line - 0.42), len(text) - 0.12, 0.84, **face))
    # Characters are placed one by one, because the font's widths do not fit the boxes.
    for i, character in enumerate(text):
        if character != " ":
            panel.text(column + i + 0.5, line, character, family="monospace", fontsize=9, ha="center", va="center")


def _layout(pieces: list[list[str]]) -> list[tuple[int, int, str, str]]:
    """Returns column, line, text and source of each token that fits; a line break is shown and starts a new line."""
    out = []
    column, line = 0, 0
    for text, source in pieces:
        shown = printable(text.replace("\n", "\u21b5"))[:_COLUMNS] or "\u00b7"  # a token that ends inside a character
        if column + len(shown) > _COLUMNS:
            column, line = 0, line + 1
        if line >= _LINES:
            break
        out.append((column, line, shown, source))
        column += len(shown)
        if "\n" in text:
            column, line = 0, line + 1
    return out


def _height(pieces: list[tuple[int, int, str, str]]) -> int:
    return 1 + max(line for _, line, _, _ in pieces)


def _legend_lines(names: list[str]) -> list[list[tuple[int, str]]]:
    """Returns column and name of the legend, by line."""
    lines: list[list[tuple[int, str]]] = [[]]
    column = 0
    for name in (printable(name)[: _COLUMNS - 2] for name in names):
        if column + len(name) > _COLUMNS:
            lines.append([])
            column = 0
        lines[-1].append((column, name))
        column += len(name) + 2
    return lines
