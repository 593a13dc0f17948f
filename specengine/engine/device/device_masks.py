"""Masks of drafted trees for cycles on the device: the host fills them while the target runs, and copies them there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specengine.constraints import Constraint
from specengine.constraints.background import begin_fill, finish_fills
from specengine.draft_trees.token_masks import mask_words
from specengine.draft_trees.tree import DraftTree, TreeBatch


class DeviceMasks:
    """Room for the masks of one cycle after the other.  rows: of the largest pass."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._device, self._shape = device, (rows, mask_words(vocab))
        self._masks: torch.Tensor | None = None  # made for the first constrained request, as the room on the host is
        self._copied: torch.cuda.Event | None = None  # records where the trees have arrived on the host

    def begin(self, tree: TreeBatch) -> None:
        """Begins to copy drafted trees to the host, before the target's pass is launched."""
        if self._masks is None:
            self._make_room()
        self._rows = len(tree.tokens)
        for column, drafted in zip(self._trees, (tree.tokens, tree.parents), strict=True):
            column[: self._rows].copy_(drafted, non_blocking=True)
        if self._copied:
            self._copied.record()

    def fill(self, constraints: Sequence[Constraint | None], nodes: int) -> torch.Tensor:
        """Returns the masks of the trees of begin() on the device, int32 [M, W]; waits for the trees alone.

        constraints: of the slots; rows of the others are all ones.  nodes: rows of a slot.
        """
        if self._copied:
            self._copied.synchronize()
        tokens, parents = (column[: self._rows].tolist() for column in self._trees)
        host = self._host[: self._rows]
        rows = host.numpy()
        rows[:] = -1
        under_way = []
        for slot, constraint in enumerate(constraints):
            first, end = slot * nodes, (slot + 1) * nodes
            used = tokens[first:end].index(-1) if -1 in tokens[first:end] else nodes
            if constraint is not None and used:
                tree = DraftTree(tokens[first : first + used], parents[first : first + used])
                under_way.append(begin_fill(constraint, tree, rows[first : first + used]))
        finish_fills(under_way)
        assert self._masks is not None  # begin() comes first
        masks = self._masks[: self._rows]
        masks.copy_(host, non_blocking=True)
        return masks

    def _make_room(self) -> None:
        pinned = self._device.type == "cuda"
        self._copied = torch.cuda.Event() if pinned else None
        self._host = torch.empty(self._shape, dtype=torch.int32, pin_memory=pinned)
        self._trees = torch.empty(2, self._shape[0], dtype=torch.int32, pin_memory=pinned)
        self._masks = torch.empty(self._shape, dtype=torch.int32, device=self._device)
