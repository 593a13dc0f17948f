"""Limits that the `tokenizers` library lacks: types of its errors, length of entries, growth of a text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LONGEST_ENTRY = 1024  # characters; finding the merges of an entry takes quadratic time
_MAX_GROWTH = 256  # factor; Unicode normalisation makes at most 18 characters of one


@contextmanager
def library_errors(source: str) -> Iterator[None]:
    """Turns errors of the library into ValueErrors that begin with `source`.

    The library raises plain Exception; a failed assertion in it raises PanicException, a BaseException.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{source}: {error}") from None


def check_entries(tokens: Sequence[str], source: str) -> None:
    """Raises ValueError for a vocabulary entry of more than LONGEST_ENTRY characters."""
    if (longest := max(map(len, tokens), default=0)) > LONGEST_ENTRY:
        raise ValueError(f"{source}: an entry has {longest} characters, expected at most {LONGEST_ENTRY}")


def check_growth(part: Any, source: str) -> None:
    """Raises ValueError for a normalizer or decoder whose chained replacements could make a short text huge.

    part: the normalizer or decoder, or None.
    """
    if part is not None and (growth := _growth(json.loads(part.__getstate__()))) > _MAX_GROWTH:
        raise ValueError(
            f"{source}: replacements make a text {growth:.3g} times as long, expected at most {_MAX_GROWTH}"
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
    # A regular expression counts as empty, because it may match between any two characters.
    pattern = step["pattern"].get("String", "")
    content = len(step["content"])
    return max(1.0, content / len(pattern)) if pattern else 1 + content
