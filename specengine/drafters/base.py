"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from specengine.tree import DraftTree

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer
    from specengine.sequence import Sequence as TokenSequence


class Drafter(ABC):
    """Proposes a tree per sequence and cycle. Node 0 is the root, the last committed token.

    What it remembers of a sequence lives in `sequence.drafter_state`, so that one drafter serves any batch.
    """

    name: ClassVar[str]
    Config: ClassVar[type]  # dataclass of the options
    takes_path: ClassVar[bool] = False

    def __init__(self, config: Any, path: str | None, target: Transformer) -> None:
        self.config = config

    @property
    @abstractmethod
    def max_nodes(self) -> int:
        """Largest tree it ever proposes, root included: the cache reserves as many slots."""

    @abstractmethod
    def draft(self, sequences: Sequence[TokenSequence]) -> list[DraftTree]:
        """One tree per sequence, no deeper than the sequence's `draft_limit`."""

    def observe(
        self, sequences: Sequence[TokenSequence], committed: Sequence[list[int]], features: torch.Tensor | None
    ) -> None:
        """Told after every cycle what was committed (accepted tokens, then the bonus), before the next draft.

        features: float32 [M, hidden] of the rows verified, or None.
        """
        return None
