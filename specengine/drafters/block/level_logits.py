"""The logits of a block draft, level by level, behind nodes that were chosen elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.drafters.block.head import OpenDraft
from specengine.drafters.distributions.growth import Growth


class BlockLevels:
    """Continues a draft. trees: roots, in the order of its blocks.

    confidence: float32 [R], of the last level's open nodes, as of Step.
    """

    def __init__(self, draft: OpenDraft, trees: Sequence[Growth], device: torch.device) -> None:
        self._draft, self._device = draft, device
        self._blocks = {tree.slot: number for number, tree in enumerate(trees)}
        self.confidence: torch.Tensor | None = None
        self._memory: torch.Tensor | None = None  # of the last level's open nodes
        self._rows: dict[tuple[int, int], int] = {}  # (slot, node) -> its row there

    def __call__(self, growing: Sequence[Growth], level: int) -> torch.Tensor:
        """Returns the logits [R, Vd] of all open nodes."""
        nodes = [(tree, node) for tree in growing for node in tree.open]
        owners = torch.tensor([self._blocks[tree.slot] for tree, _ in nodes], device=self._device)
        tokens = torch.tensor([tree.tokens[node] for tree, node in nodes], dtype=torch.int32, device=self._device)
        memory = None
        if self._memory is not None:
            memory = self._memory[[self._rows[tree.slot, tree.parents[node]] for tree, node in nodes]]
        step = self._draft.step(level, owners, tokens, memory)
        self._memory, self.confidence = step.memory, step.confidence
        self._rows = {(tree.slot, node): row for row, (tree, node) in enumerate(nodes)}
        return step.logits
