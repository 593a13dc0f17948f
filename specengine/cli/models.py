"""The models that need no path, for `specengine models`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Column, Table

from specengine.hub.embedded_models import cached_embedded, drafters_for, list_models
from specengine.models.presets import PRESETS


def embedded_models(check: bool) -> list[dict[str, Any]]:
    """Embedded models as JSON values; state: not fetched, cached, or with `check` verified or damaged."""
    found = []
    for entry in list_models(verify=check):
        # A damaged file of the right size passes the quick look and fails the full one.
        damaged = check and entry.path is None and cached_embedded(entry.name) is not None
        missing = "damaged" if damaged else "not fetched"
        state = missing if entry.path is None else "verified" if check else "cached"
        path, drafters = entry.path and str(entry.path), drafters_for(entry.name)
        found.append({**vars(entry), "path": path, "state": state, "drafters": drafters})
    return found


def random_presets() -> list[dict[str, Any]]:
    """Presets of random weights as JSON values."""
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


def show_models(embedded: list[dict[str, Any]], presets: list[dict[str, Any]]) -> None:
    """Both lists as tables on stdout."""
    console = Console(highlight=False)
    table = _table("Embedded models", "state", "size", "licence", "description")
    for entry in embedded:
        size = f"{entry['size_bytes'] / 1e6:.0f} MB"
        table.add_row(entry["name"], entry["state"], size, entry["license"], entry["description"])
    console.print(table)
    for entry in embedded:
        console.print(f"Drafters that come with {entry['name']}: {', '.join(entry['drafters']) or 'none'}", style="dim")
    table = _table("Random weights", "architecture", "layers", "hidden size", "vocabulary", "context")
    for preset in presets:
        table.add_row(*map(str, preset.values()))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    return Table(Column("model", no_wrap=True), *columns, title=title, title_justify="left")
