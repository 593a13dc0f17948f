"""`specengine report`: compares recorded benchmark results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specengine.utils.console import note


def report(
    results: Annotated[list[Path], typer.Argument(help="JSON files of `python -m specengine.bench --json`.")],
    out: Annotated[Path, typer.Option(help="The report, one self-contained HTML file.")],
    pictures: Annotated[Path | None, typer.Option(help="Folder for the pictures as PNG files.")] = None,
) -> None:
    """Compare recorded results side by side, with pictures (needs matplotlib)."""
    from specengine.bench.report.html_report import write_report

    write_report(results, out, pictures)
    note(f"{len(results)} results in {out}")
