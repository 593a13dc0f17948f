"""Refuses to share a drafter between engines, where its memory goes with one engine's cache."""

from __future__ import annotations


class OneEngine:
    """Counts the engines of a drafter. drafter: its name, for the error."""

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._claimed = False

    def claim(self) -> None:
        """Gives the drafter to an engine. Raises ValueError where another engine has it already."""
        if self._claimed:
            raise ValueError(f"drafter: {self._drafter} belongs to another engine; make one for each engine")
        self._claimed = True
