"""Labels of tables and pictures: short names of drafters, and counts with a noun."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath


def short_labels(drafters: Sequence[str]) -> list[str]:
    """Shortens `fasteagle:/runs/3/best,top_k=2` to `fasteagle:best,top_k=2`.

    More of the path, as `3/best`, is kept if another path ends in `best`.
    """
    parts = [_parts(text) for text in drafters]
    paths = {(name, path) for name, path, _ in parts}
    labels = []
    for name, path, options in parts:
        others = [other for kind, other in paths if kind == name and other != path]
        count = 1
        while count < len(path.parts) and any(_end(path, count) == _end(other, count) for other in others):
            count += 1
        labels.append(name + (f":{_end(path, count)}" if path.parts else "") + options)
    return labels


def _parts(text: str) -> tuple[str, PurePath, str]:
    head, comma, options = text.partition(",")
    name, _, path = head.partition(":")
    return name, PurePath(path), comma + options


def _end(path: PurePath, count: int) -> str:
    return str(PurePath(*path.parts[-count:]))


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun, as `1 question` or `2 questions`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
