"""A choice of texts as one expression: a rule has 2,000 alternatives at most, and choices may be many thousands."""

from __future__ import annotations

import re
from collections.abc import Iterable


def regex_of(choices: Iterable[str]) -> str:
    """Returns the expression that matches these texts alone."""
    return "|".join(re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text) for text in choices)
