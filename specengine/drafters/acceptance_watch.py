"""Warns about a drafter whose guesses are almost never right: its use is wrong more often than its training."""

from __future__ import annotations

import warnings

CYCLES, LEAST = 64, 0.03  # after so many cycles, fewer first tokens guessed than this share of them


class AcceptanceWatch:
    """Warns once if almost none of a drafter's first tokens were right in its first cycles.

    drafter: its name.
    """

    def __init__(self, drafter: str) -> None:
        self._drafter = drafter
        self._cycles = 0
        self._guessed = 0

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
                "prompt has, or for hidden states of other layers of the target. The output is correct all the same, "
                "but drafting only costs time.",
                stacklevel=2,
            )
