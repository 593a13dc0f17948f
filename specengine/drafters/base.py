"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specengine.tree import DraftTree, TreeBatch

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer
    from specengine.resident import Slots
    from specengine.sequence import Sequence as TokenSequence


class Drafter(ABC):
    """Proposes a tree per sequence and cycle. Node 0 is the root, the last committed token.

    What it remembers of a sequence lives in `sequence.drafter_state`, so that one drafter serves any batch.
    """

    name: ClassVar[str]
    Config: ClassVar[type]  # dataclass of the options
    takes_path: ClassVar[bool] = False
    drafts_on_device: ClassVar[bool] = False  # whether draft_on_device can be part of a captured cycle

    def __init__(self, config: Any, path: str | None, target: Transformer) -> None:
        self.config = config

    @property
    def adaptive(self) -> bool:
        """Whether the tree's size may follow what pays; else it is always the largest."""
        return True

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Largest tree it ever proposes, root included: the cache reserves as many slots."""

    @abstractmethod
    def draft(self, sequences: Sequence[TokenSequence]) -> list[DraftTree]:
        """One tree per sequence, no deeper than the sequence's `draft_limit`."""

    def draft_on_device(self, slots: Slots) -> TreeBatch:
        """One tree of slots.nodes rows per slot from device tensors alone: nothing of it may come from the host.

        A drafter without this drafts on the host between two cycles, which costs a cycle's overlap.
        """
        raise NotImplementedError(f"{self.name} drafts on the host")

    def observe(
        self, sequences: Sequence[TokenSequence], committed: Sequence[list[int]], features: torch.Tensor | None
    ) -> None:
        """Told after every cycle what was committed (accepted tokens, then the bonus), before the next draft.

        features: float32 [M, hidden] of the rows verified, or None.
        """
        return None
