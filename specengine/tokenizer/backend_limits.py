"""What the `tokenizers` library does not bound itself: its errors, and how much longer a text may become in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LONGEST_ENTRY = 1024  # characters: finding the merges of one takes the square
_MOST_GROWTH = 256  # times: one character of Unicode becomes 18 at most


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Errors of the library as ValueErrors that begin with `what`; it raises plain Exception, and a failed assertion
    in it (PanicException) is not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from None


def check_entries(tokens: Sequence[str], what: str) -> None:
    """Raises ValueError for a vocabulary entry longer than any has."""
    if (longest := max(map(len, tokens), default=0)) > LONGEST_ENTRY:
        raise ValueError(f"{what}: an entry has {longest} characters, expected at most {LONGEST_ENTRY}")


def check_growth(part: Any, what: str) -> None:
    """Raises ValueError for a normalizer or decoder (None: there is none) whose replacements one after the other could
    make a text of any length from a short one."""
    if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > _MOST_GROWTH:
        raise ValueError(
            f"{what}: replacements make a text {growth:.3g} times as long, expected at most {_MOST_GROWTH}"
        )


def _growth(step: dict[str, Any]) -> float:
    if step["type"] == "Sequence":
        growth = 1.0
        for each in step.get("normalizers") or step.get("decoders") or ():
            growth = min(growth * _growth(each), 1e300)
        return growth
    if step["type"] == "Prepend":
        return 1 + len(step["prepend"])
    if step["type"] != "Replace":
        return 1
    pattern = step["pattern"].get("String", "")  # an expression may match nothing, between any two characters
    content = len(step["content"])
    return max(1.0, content / len(pattern)) if pattern else 1 + content
