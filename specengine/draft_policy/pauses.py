"""For how long something costly is skipped: for more and more cycles where it did not pay recently."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import ceil

SHARE = 100  # a loss takes a hundredth of the time, where pauses may be as long as that asks for
SHORT, LONGEST = 15, 255  # cycles: a small loss is tried again soon, and any loss is tried again at last
MEMORY = 16  # uses: gains vary so much from use to use that a shorter memory would pause what pays
TRIED = 8  # uses before the first pause: the first ones are slow, and the worth of drafts is still unknown


@dataclass
class _Pause:
    """saved: recent mean saving of a use, in plain cycles.  cycles: of the last pause.  left: cycles left of it."""

    saved: float = 0.0
    uses: int = 0
    cycles: int = 0
    left: int = 0


class Pauses:
    """Decides, by what each use saved, in which cycles to skip the use.

    Batch sizes are told apart by powers of two: rows that are nearly free for one request are not for many.
    bearable: loss, as a share of one request's plain cycle, that is no reason to skip.
    """

    def __init__(self, bearable: float = 0.0) -> None:
        self._bearable = bearable
        self._sizes = defaultdict[int, _Pause](_Pause)

    def should_skip(self, requests: int) -> bool:
        """Returns whether to skip the use in this cycle; to be called once a cycle."""
        pause = self._sizes[requests.bit_length()]
        pause.left -= 1
        return pause.left >= 0

    def record_saving(self, requests: int, saved: float, plain: float) -> None:
        """Records one use. saved: seconds, negative for a loss.  plain: seconds of a cycle without the use."""
        pause = self._sizes[requests.bit_length()]
        pause.uses = min(pause.uses + 1, MEMORY)
        pause.saved += (saved / plain - pause.saved) / pause.uses
        most = min(LONGEST, max(SHORT, ceil(-SHARE * pause.saved)))
        loses = pause.uses >= TRIED and pause.saved < -self._bearable / requests
        pause.cycles = min(most, 2 * pause.cycles + 1) if loses else 0
        pause.left = 0 if saved > 0 else pause.cycles  # one gain promises another soon: texts have such passages
