"""Bounds what a Lark grammar may ask of the grammar engine."""

from __future__ import annotations

_FORCING = '"no_forcing"'


def bound_forcing(grammar: str) -> str:
    """Leaves a grammar's forced texts unsearched unless it decides that itself: the search may never end."""
    return grammar if _FORCING in grammar else f"{grammar}\n%llguidance {{{_FORCING}: true}}"
