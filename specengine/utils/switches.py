"""Switches in the environment, for measurements of a mechanism against its absence."""

from __future__ import annotations

import os


def is_on(name: str) -> bool:
    """Returns whether a switch is on, as it is by default. Raises ValueError for another value than 0 and 1."""
    value = os.environ.get(name, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{name}: expected 0 or 1, got {value!r}")
    return value == "1"
