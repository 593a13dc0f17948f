"""Reads a Lark grammar outside of its literals, and bounds what it may ask of the grammar engine."""

from __future__ import annotations

import re

_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\\n])+/')
_FORCING = '"no_forcing"'


def without_literals(grammar: str) -> str:
    """Returns a grammar with spaces in place of its strings, regexes and comments; every place stays the same."""
    return _LITERAL.sub(lambda found: " " * len(found[0]), grammar)


def bound_forcing(grammar: str) -> str:
    """Leaves a grammar's forced texts unsearched unless it decides that itself: the search may never end."""
    return grammar if _FORCING in grammar else f"{grammar}\n%llguidance {{{_FORCING}: true}}"
