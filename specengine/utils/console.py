"""Notes and one-line errors on stderr, for every command."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_line_errors(*further: type[BaseException]) -> Iterator[None]:
    """Prints an error that a user can cause as one line on stderr.

    further: kinds beside ValueError, OSError and MemoryError.
    The exit status is 2 for bad input and 1 for other errors.
    """
    kinds: tuple[type[BaseException], ...] = (ValueError, OSError, MemoryError, *further)
    try:
        yield
    except BrokenPipeError:  # the reader closed stdout
        # Python would flush stdout again at exit and report a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except kinds as error:
        show_error(error)
        raise typer.Exit(2 if isinstance(error, ValueError | FileNotFoundError) else 1) from None


def show_error(error: BaseException) -> None:
    """Prints `error: ...` on one line of stderr."""
    message = " ".join(str(error).split()) or type(error).__name__
    typer.secho(f"error: {message}", fg="red", err=True)


def note(text: str) -> None:
    """Prints a dim line on stderr."""
    typer.secho(text, dim=True, err=True)
