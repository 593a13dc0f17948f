"""Words of tables and pictures: short names for drafters that tell those of a run apart, counted things."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath


def short_labels(drafters: Sequence[str]) -> list[str]:
    """`fasteagle:/runs/3/best,top_k=2` as `fasteagle:best,top_k=2`; `3/best` where another one's path ends alike."""
    taken = [_apart(text) for text in drafters]
    paths = {(name, path) for name, path, _ in taken}
    labels = []
    for name, path, options in taken:
        others = [other for kind, other in paths if kind == name and other != path]
        count = 1
        while count < len(path.parts) and any(_end(path, count) == _end(other, count) for other in others):
            count += 1
        labels.append(name + (f":{_end(path, count)}" if path.parts else "") + options)
    return labels


def _apart(text: str) -> tuple[str, PurePath, str]:
    head, comma, options = text.partition(",")
    name, _, path = head.partition(":")
    return name, PurePath(path), comma + options


def _end(path: PurePath, count: int) -> str:
    return str(PurePath(*path.parts[-count:]))


def counted(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
