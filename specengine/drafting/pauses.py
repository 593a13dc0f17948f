"""When something costly is left out: for more and more cycles where it did not pay of late."""

from __future__ import annotations

from math import ceil

from specengine.drafting.cost_model import CostModel
from specengine.drafting.tree_choice import cycle_seconds

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


class Trial:
    """Leaves a drafter's cycles out, for so long that what they lose stays a twentieth of the time.

    costs: of the target's passes.
    """

    _SHARE, _MEMORY = 20, 8

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._saved, self._uses = 0.0, 0  # of a plain cycle, by a drafted one, of late
        self._left = 0
        self._open: tuple[int, float, float] | None = None

    def here(self) -> bool:
        """Whether to do without in this cycle; to be asked once a cycle."""
        self._left -= 1
        return self._left >= 0

    def drafted(self, sequences: int, nodes: int, prefix: float, seconds: float) -> None:
        """Notes a draft. nodes: of all sequences, beside the roots.  seconds: that it took."""
        plain = cycle_seconds(self._costs, sequences, 0, prefix)
        self._open = sequences, plain, cycle_seconds(self._costs, sequences, nodes, prefix) + seconds

    def committed(self, tokens: int) -> None:
        """Notes what became of it: tokens of all sequences."""
        draft, self._open = self._open, None  # at once: engines in other threads may share the drafter
        if draft is None:
            return
        sequences, plain, taken = draft
        saved = tokens / sequences - taken / plain
        self._uses = min(self._uses + 1, self._MEMORY)
        self._saved += (saved - self._saved) / self._uses
        self._left = ceil(-self._SHARE * self._saved) if self._saved < 0 else 0
