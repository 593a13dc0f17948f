"""When something costly is left out: for more and more cycles where it did not pay of late."""

from __future__ import annotations

LONGEST = 15  # cycles: what never pays costs a sixteenth of what it takes
MEMORY = 16  # uses: what one saves differs so much from the next that fewer would pause what pays


class Pauses:
    """Told what each use saved, says when to do without."""

    def __init__(self) -> None:
        self._saved, self._uses = 0.0, 0  # seconds of a cycle, of late
        self._pause = self._left = 0  # cycles

    def here(self) -> bool:
        """Whether to do without in this cycle; to be asked once a cycle."""
        self._left -= 1
        return self._left >= 0

    def weigh(self, saved: float) -> None:
        """saved: seconds of a cycle, against one without; less than 0 is a loss."""
        self._uses = min(self._uses + 1, MEMORY)
        self._saved += (saved - self._saved) / self._uses
        self._pause = min(LONGEST, 2 * self._pause + 1) if self._saved < 0 else 0
        self._left = self._pause
