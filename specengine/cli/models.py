"""`specengine models`: lists the models that need no path."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from specengine.hub.embedded_models import cached_embedded, drafters_for, list_models
from specengine.models.presets import PRESETS


def models(
    check: Annotated[bool, typer.Option("--check", help="Verify the SHA-256 of cached files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """List the models that need no path: embedded models and presets of random weights.

    --check exits with status 1 if a cached file is damaged.
    """
    embedded, presets = embedded_models(check), random_presets()
    if as_json:
        typer.echo(json.dumps({"embedded": embedded, "random": presets}))
    else:
        _show_models(embedded, presets)
    if any(entry["state"] == "damaged" for entry in embedded):
        raise typer.Exit(1)


def embedded_models(check: bool) -> list[dict[str, Any]]:
    """Lists the embedded models as JSON values.

    state: `not fetched` or `cached`; with `check`, `verified` or `damaged` replaces `cached`.
    """
    found = []
    for entry in list_models(verify=check):
        # The quick look checks only the size, so it accepts a damaged file of the right size.
        damaged = check and entry.path is None and cached_embedded(entry.name) is not None
        missing = "damaged" if damaged else "not fetched"
        state = missing if entry.path is None else "verified" if check else "cached"
        path = str(entry.path) if entry.path else None
        found.append({**vars(entry), "path": path, "state": state, "drafters": drafters_for(entry.name)})
    return found


def random_presets() -> list[dict[str, Any]]:
    """Lists the presets of random weights as JSON values."""
    return [
        {
            "name": f"random:{name}",
            "architecture": config.architecture,
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "max_position": config.max_position,
        }
        for name, config in PRESETS.items()
    ]


def _show_models(embedded: list[dict[str, Any]], presets: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    table = _table("Embedded models", "state", "size", "licence", "description")
    for entry in embedded:
        size = f"{entry['size_bytes'] / 1e6:.0f} MB"
        table.add_row(entry["name"], entry["state"], size, entry["license"], entry["description"])
    console.print(table)
    for entry in embedded:
        console.print(f"Drafters that come with {entry['name']}: {', '.join(entry['drafters']) or 'none'}", style="dim")
    table = _table("Random weights", "architecture", "layers", "hidden", "vocab", "context")
    for preset in presets:
        table.add_row(*map(str, preset.values()))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    """Makes a table that folds what is too wide for a terminal, and cuts nothing."""
    folded = (Column(name, overflow="fold") for name in columns)
    return Table(Column("model", no_wrap=True, overflow="fold"), *folded, title=title, title_justify="left")
