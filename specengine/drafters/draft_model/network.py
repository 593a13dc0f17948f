"""A small model as the network of a drafter."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.draft_model.small_model import SmallModel
from specengine.drafters.growth import Opened, Steps
from specengine.ops.growth.growing_trees import GrownRows, Logits
from specengine.ops.row_tools import take_rows


class ModelNetwork:
    """Drafts with a small model.

    The keys of drafted nodes lie after the root's. The states of a hybrid stay as they were before the root, and
    no pass of a draft writes them: each one begins at the root.
    """

    def __init__(self, small: SmallModel) -> None:
        self._small = small

    def draft(self, opened: Opened, levels: int) -> Steps:
        """Reads the text; then passes one level after the other."""
        small, model = self._small, self._small.model
        hidden = model.hidden(opened.rows, small.cache, opened.place)
        if small.hybrid:
            assert isinstance(opened.rows, TreeBatch) and opened.rows.starts is not None  # drafted for on the host
            before = [end - first - 1 for first, end in pairwise(opened.rows.starts)]  # the root
            small.replay(opened.rows, opened.place, before)
        hidden, whole = take_rows(hidden, opened.last), WholeTrees(opened.roots) if small.hybrid else None
        while True:
            rows = yield Logits(model.logits(hidden))
            if whole:
                hidden = whole.last(model.hidden(whole.add(rows), small.cache, opened.root_place))
            else:
                hidden = model.hidden(rows, small.cache, opened.root_place, rows.first_node)


class WholeRows(NamedTuple):
    """The rows of whole trees, root first, as those of a TreeBatch."""

    tokens: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor


class WholeTrees:
    """Collects the rows of growing trees.  roots: int32 [B, 1]."""

    def __init__(self, roots: torch.Tensor) -> None:
        self._tokens, self._depths, self._ancestors = roots, torch.zeros_like(roots), torch.ones_like(roots)[..., None]

    def add(self, rows: GrownRows) -> WholeRows:
        """Adds a level; returns all rows, request after request."""
        batch, self._width = rows.beam.shape
        bits = rows.ancestors.view(batch, self._width, -1)
        root = torch.nn.functional.pad(self._ancestors, (0, bits.shape[2] - self._ancestors.shape[2]))
        self._tokens = torch.cat([self._tokens, rows.tokens.view(batch, -1)], dim=1)
        self._depths = torch.cat([self._depths, rows.depths.view(batch, -1)], dim=1)
        self._ancestors = torch.cat([root, bits], dim=1)
        count = self._tokens.shape[1]
        starts = torch.arange(0, batch * count + 1, count, dtype=torch.int32, device=rows.tokens.device)
        return WholeRows(self._tokens.flatten(), self._depths.flatten(), starts, self._ancestors.flatten(0, 1))

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of the rows that were added last, of those of all rows."""
        return hidden.view(*self._tokens.shape, -1)[:, -self._width :].flatten(0, 1).contiguous()
