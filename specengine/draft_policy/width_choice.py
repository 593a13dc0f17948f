"""Which of the captured tree widths pays."""

from __future__ import annotations

from collections.abc import Sequence

from specengine.draft_policy.acceptance import Acceptance


class WidthChoice:
    """Chooses among a few fixed tree widths by their cycle times and by how deep they were accepted recently.

    A wider tree is accepted deeper, and the drafter decides by how much. Each width therefore has rates of its own,
    which lean on the rates of all widths.  nodes: of the widest tree, root included.
    """

    PRIOR = 0.5  # chance of a drafted token before any observation
    PROBE = 32  # root-only cycles between two probes, which keep acceptance known

    def __init__(self, nodes: int) -> None:
        self._all = Acceptance([self.PRIOR] * (nodes - 1), weight=4, memory=100)
        self._widths: dict[int, Acceptance] = {}
        self._undrafted = 0

    def _acceptance(self, width: int) -> Acceptance:
        return self._widths.setdefault(width, Acceptance(self._all, weight=8, memory=100))

    def choose(self, widths: Sequence[int], seconds: Sequence[float]) -> int:
        """Returns the width with the least expected time per token.

        widths: ascending.  seconds: of a cycle of each width.
        """
        best = widths[0]
        least = float("inf")
        for width, time in zip(widths, seconds, strict=True):
            expected = reach = 1.0
            for rate in self._acceptance(width).rates()[: width - 1]:
                reach *= rate
                expected += reach
            if time / expected < least:  # the narrowest of equals
                best, least = width, time / expected
        self._undrafted = self._undrafted + 1 if best == 1 else 0
        probe = self._undrafted and self._undrafted % self.PROBE == 0
        return widths[min(1, len(widths) - 1)] if probe else best

    def observe(self, width: int, drafted: int, accepted: int) -> None:
        """Learns from a cycle of this width; where the drafter found nothing, the first token counts as refused."""
        for depth in range(min(accepted + 1, max(drafted, 1), width - 1)):
            self._acceptance(width).observe(depth, depth < accepted)
