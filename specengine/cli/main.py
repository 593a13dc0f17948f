"""The console script `specengine`: one file for each command.

Commands import torch only when they run, so `specengine --help` starts at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specengine.cli.chat import chat
from specengine.cli.corpus import corpus
from specengine.cli.generate import generate
from specengine.cli.models import models
from specengine.cli.quantize import quantize
from specengine.cli.report import report
from specengine.cli.serve import serve
from specengine.cli.train import train
from specengine.cli.version import print_version
from specengine.types import ModelFetchError
from specengine.utils.console import one_line_errors


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        with one_line_errors(ModelFetchError):
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    help="Lossless speculative decoding for LLaMA, Vicuna, Mistral and Qwen models.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Show version and build, then exit."),
    ] = False,
) -> None:
    pass


for command in (generate, chat, serve, models, quantize, train, corpus, report):
    app.command()(command)


def main() -> None:
    """Runs the console script. Ctrl-C ends it without a traceback, even while torch is loading."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some terminals cannot show every character
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
