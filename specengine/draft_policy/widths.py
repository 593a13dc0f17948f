"""Which of the captured tree widths pays, where a graph on the device drafts before the host can judge."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from specengine.draft_policy.acceptance import Acceptance
from specengine.draft_policy.policy import EXPLORED


class WidthPolicy:
    """Chooses the width with the least seconds per expected token, by how deep each width was accepted recently.

    A wider tree is accepted deeper, and the drafter decides by how much. Each width therefore has rates of its own,
    which lean on the rates of all widths.  nodes: of the widest tree, root included.
    """

    def __init__(self, nodes: int) -> None:
        self._all = Acceptance([0.5] * (nodes - 1), weight=4, memory=100)
        self._widths = {width: Acceptance(self._all, weight=8, memory=100) for width in range(1, nodes + 1)}
        self._left = 0.0  # seconds that drafts may lose to be explored

    def choose(self, widths: Sequence[int], seconds: Sequence[float]) -> int:
        """Returns the width of the next cycle.

        widths: ascending.  seconds: of a cycle of each width.
        """
        for width in widths:
            self._widths[width].refresh()  # what other widths taught counts for widths that are never chosen
        expected = [1 + sum(accumulate(self._widths[width].rates()[: width - 1], mul)) for width in widths]
        best = min(range(len(widths)), key=lambda i: (seconds[i] / expected[i], i))  # the narrowest of equals
        if best == 0 and len(widths) > 1:  # a root alone shows nothing of the drafter
            loss = seconds[1] - expected[1] * seconds[0] / expected[0]
            self._left = min(self._left + EXPLORED * seconds[0], loss)
            if self._left >= loss:
                self._left, best = 0.0, 1
        return widths[best]

    def observe(self, width: int, levels: int, accepted: int) -> None:
        """Learns from a cycle of this width.

        levels: of its tree; where the drafter found nothing, the first token counts as refused.
        accepted: drafted tokens.
        """
        for depth in range(min(accepted + 1, max(levels, 1), width - 1)):
            self._widths[width].observe(depth, depth < accepted)
