"""Counts the kernels that a stretch of code starts: the core's and torch's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Launches:
    """Kernels by name. ours: of the core.  torch: one per call, though a sort or a long concatenation takes more.

    views: torch's calls that start no kernel: they allocate or describe.
    """

    ours: Counter[str] = field(default_factory=Counter)
    torch: Counter[str] = field(default_factory=Counter)
    views: Counter[str] = field(default_factory=Counter)

    @property
    def totals(self) -> dict[str, int]:
        """The numbers that are recorded."""
        return {"ours": self.ours.total(), "torch": self.torch.total()}

    @property
    def total(self) -> int:
        return self.ours.total() + self.torch.total()

    def __str__(self) -> str:
        parts = {"ours": self.ours, "torch": self.torch, "views": self.views}
        return "\n".join(f"{kind}: {dict(counts.most_common())}" for kind, counts in parts.items())
