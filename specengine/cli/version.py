"""`specengine --version`."""

from __future__ import annotations

import typer


def print_version(wanted: bool) -> None:
    """Prints the version and the build, then exits."""
    if not wanted:
        return
    from specengine.utils.build_info import WITHOUT_CUDA, build_info

    info = build_info()
    typer.echo(f"specengine {info['version']}")
    typer.echo(f"compiler: {info['compiler']}")
    typer.echo(f"instruction sets: {', '.join(info['instruction_sets'])} (in use: {info['instruction_set']})")
    typer.echo(f"CUDA architectures: {', '.join(info['cuda_architectures']) or WITHOUT_CUDA}")
    raise typer.Exit
