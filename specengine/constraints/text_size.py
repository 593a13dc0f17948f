"""How much a grammar's text says: a measure of the memory that it takes once it is compiled."""

from __future__ import annotations

import re

_PIECE = re.compile(r"\\.|\{(\d{1,9})(?:,(\d{1,9})?)?\}|[()]|[^\\(){]+|.", re.DOTALL)


def text_size(text: str) -> int:
    """Counts the characters of a text. Those that a regex repeats, as in `(ab){1000}`, count as often as it may."""
    sizes, last = [0], 0  # of the open groups, and of what a repetition behind it would repeat
    for piece in _PIECE.finditer(text):
        if piece[0] == "(":
            sizes.append(0)
        elif piece[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif piece[1]:
            sizes[-1] += last * (max(int(piece[1]), int(piece[2] or 0)) - 1)
        else:
            last = 1
            sizes[-1] += len(piece[0])
    return max(sum(sizes), len(text))
