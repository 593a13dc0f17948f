"""`specengine quantize`: writes a model in a quantised format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specengine.utils.console import note


def quantize(
    model: Annotated[str, typer.Argument(help="Embedded name, checkpoint folder, GGUF file or hub name.")],
    to: Annotated[str, typer.Option(help="q4_1 or q8_0 (GGUF file), int4-g128 or fp8-block (folder).")],
    out: Annotated[Path, typer.Option(metavar="DIR|FILE.gguf", help="Where the model is written.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
) -> None:
    """Write a model in a quantised format that the engine and others read.

    At most one tensor is in memory, of experts one matrix. OUT appears when it is complete.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from specengine.quantise.quantise import quantise

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tensors")

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=name)

        outcome = quantise(model, to, out, overwrite=overwrite, progress=show)
    note(f"{out}: {outcome.size / 1e6:.1f} MB, {outcome.tensors} tensors in {outcome.seconds:.1f} s")
