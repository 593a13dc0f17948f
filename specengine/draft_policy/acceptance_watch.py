"""Notices a drafter that guesses nothing, which is a mistake in its use more often than in its training."""

from __future__ import annotations

import warnings

CYCLES, LEAST = 64, 0.03  # after so many cycles, fewer first tokens guessed than this share of them


class AcceptanceWatch:
    """Warns once if in the first cycles hardly ever one of a drafter's first tokens was the text's.

    drafter: its name.
    """

    def __init__(self, drafter: str) -> None:
        self._drafter, self._cycles, self._guessed = drafter, 0, 0

    def observe(self, guessed: bool) -> None:
        """Counts one cycle; guessed: whether a child of the root was the next token."""
        if self._cycles == CYCLES:
            return
        self._cycles += 1
        self._guessed += guessed
        if self._cycles == CYCLES and self._guessed < LEAST * CYCLES:
            warnings.warn(
                f"drafter {self._drafter}: {self._guessed} of its first {CYCLES} guesses were right. Usual causes: it "
                "was trained for another base model or another fine-tune of it, with another chat template than this "
                "prompt has, or for features of other layers of the target. Its text is right all the same, but "
                "drafting only costs time.",
                stacklevel=2,
            )
