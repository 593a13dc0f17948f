"""A drafter with nothing but its logits: they stand in a table."""

from types import SimpleNamespace

import numpy as np
import torch

from specengine._C import MAX_NODES
from specengine.draft_trees.shapes import Beam, Ranks, Shape
from specengine.drafters.draft_vocabulary import DraftVocabulary
from specengine.drafters.growth import Steps
from specengine.drafters.network_drafter import NetworkDrafter
from specengine.drafters.reader import Reader
from specengine.ops.growth.growing_trees import Logits
from tests.backends import cpu_kernels
from tests.engines import tiny_model


class TableNetwork:
    """logits: float32 [T, V, Vd], by level and token % V; [V, Vd]: all levels alike; at_once: [T, Vd], by level."""

    def __init__(self, logits: torch.Tensor, at_once: bool) -> None:
        self.logits, self.at_once = logits, at_once

    def draft(self, opened, levels: int) -> Steps:
        if self.at_once:
            yield Logits(self.logits[:levels].repeat(len(opened.known), 1), levels=levels)
            return
        roots = opened.roots.flatten()
        rows = yield Logits(self._behind(roots, torch.zeros_like(roots)))
        while True:
            rows = yield Logits(self._behind(rows.tokens, rows.depths))

    def _behind(self, tokens: torch.Tensor, depths: torch.Tensor) -> torch.Tensor:
        """Rows of padding, whose token and depth are -1, may have any logits."""
        tokens = tokens.clamp(min=0).long() % self.logits.shape[-2]
        return self.logits[tokens] if self.logits.ndim == 2 else self.logits[depths.clamp(min=0).long(), tokens]


class RootReader(Reader):
    """Reads nothing but the last token."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def can_draft(self, request) -> bool:
        return True

    def open(self, requests, levels):
        roots = torch.from_numpy(np.array([[request.tokens[-1]] for request in requests], dtype=np.int32))
        return self._opened(roots.to(self._device))

    def open_on_device(self, batch, levels):
        return self._opened(batch.history.last)

    def _opened(self, roots: torch.Tensor):
        known = torch.ones(len(roots), dtype=torch.int32, device=self._device)
        return SimpleNamespace(roots=roots, known=known, origin=None)

    def new_device_state(self, slots):
        return None

    def load(self, state, slot, request) -> None:
        pass

    def unload(self, state, slot, request) -> None:
        pass


class Table(NetworkDrafter):
    """Drafts trees of a shape; see TableNetwork.

    known: the target's token of each column; None: all.  vocab: tokens of the target; None: rows of the table.
    nodes: of a tree at most.
    """

    name = "table"

    def __init__(
        self,
        logits: torch.Tensor,
        shape: Shape,
        drawn_shape: Beam | Ranks | None = None,
        known: list[int] | None = None,
        *,
        replacement: bool = False,
        at_once: bool = False,
        vocab: int | None = None,
        nodes: int = MAX_NODES,
        target=None,
    ) -> None:
        if target is None:
            with cpu_kernels():  # it loads a model once, whatever kernels the test runs
                target = tiny_model().target
        super().__init__(SimpleNamespace(adaptive=False, sample=True), None, target)
        tokens = None if known is None else torch.tensor(known, dtype=torch.int32)
        self.prepare(
            target,
            network=TableNetwork(logits.to(target.device), at_once),
            reader=RootReader(target.device),
            shape=shape,
            drawn_shape=drawn_shape or shape,
            columns=DraftVocabulary.of(tokens, logits.shape[-1], vocab or logits.shape[-2], target.device),
            projections=(),
            nodes=min(nodes, max(each.candidates for each in (shape, drawn_shape or shape))),
            replacement=replacement,
        )
