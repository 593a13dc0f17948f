"""Checks of single values. Every error is a ValueError that names the parameter."""

from __future__ import annotations

import numbers
from typing import Any


def check_text(name: str, text: Any) -> None:
    """Refuses everything but a string that is not empty and has a UTF-8 form."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}: expected a non-empty string, got {shown(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: character {error.start} is an unpaired surrogate, so this is no text") from None


def check_integer(name: str, value: Any, low: int, high: int) -> int:
    """Returns the value as an int (numpy's integers included)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name}: expected an integer from {low} to {high}, got {shown(value)}")
    return int(value)


def check_number(name: str, value: Any, low: float, high: float) -> float:
    """Returns the value as a float (ints and numpy's floats included)."""
    good = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not good or not low <= value <= high:  # NaN fails this comparison
        raise ValueError(f"{name}: expected a number from {low} to {high}, got {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """Returns a value as messages have it: its first characters, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or a faulty __repr__
        return f"an unprintable {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:99]}\u2026"
