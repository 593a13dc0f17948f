"""`specengine corpus`: makes a corpus for the drafter `suffix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specengine.cli import options
from specengine.utils.console import note


def corpus(
    files: Annotated[
        list[Path], typer.Argument(help="Texts, JSONL with `text`, or folders of dialogues from `specengine train`.")
    ],
    out: Annotated[Path, typer.Option(help="File of the corpus, for --drafter suffix:FILE.")],
    model: options.Model = "smollm2-135m",
    packed: Annotated[
        bool, typer.Option("--packed", help="An eighth of the size; the first start unpacks it to the cache folder.")
    ] = False,
) -> None:
    """Make a corpus of texts, from which the drafter `suffix` copies."""
    from specengine.cli.corpus_texts import make_corpus

    note(f"{make_corpus(model, files, out, packed=packed)} tokens in {out}")
