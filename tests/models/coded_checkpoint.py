"""Another checkpoint with its layers' matrices coded, as readers of quantised files present them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import Checkpoint
from specengine.models.checkpoint_base import TensorInfo
from specengine.ops.coded.rows import CodedRows, Coding
from tests.ops.coding import coded


class CodedCheckpoint(Checkpoint):
    """coding_of: the coding of a matrix by its name; None keeps its floats.

    order_of: the order of its columns in the codes, int64 [C]; None as they are.
    """

    def __init__(
        self,
        base: Checkpoint,
        coding_of: Callable[[str], Coding | None],
        order_of: Callable[[str, int], torch.Tensor | None] = lambda name, columns: None,
    ) -> None:
        self.source, self.config, self.metadata = base.source, base.config, base.metadata
        self.tensors = dict(base.tensors)
        self._base, self._coded, self._orders = base, {}, {}
        for name, info in base.tensors.items():
            coding = coding_of(name.removesuffix(".weight")) if len(info.shape) == 2 else None
            if coding is not None:
                self._orders[name] = order_of(name, info.shape[1])
                rows = base.read(name).float()
                self._coded[name] = coded(rows if self._orders[name] is None else rows[:, self._orders[name]], coding)
                self.tensors[name] = TensorInfo(info.shape, "float32", coding)

    def read_coded(self, name: str, start: int, stop: int) -> CodedRows:
        return self._coded[name].rows(start, stop)

    def read_blocks(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._base.read_blocks(name, start, stop)

    def column_order(self, name: str) -> torch.Tensor | None:
        return self._orders.get(name)

    def _fill_rows(self, out: torch.Tensor, name: str, start: int, stop: int) -> None:
        if name in self._coded:
            rows, order = self._coded[name].rows(start, stop).values(), self._orders[name]
            out.copy_(rows if order is None else rows[:, order.argsort()])
        else:
            out.copy_(self._base.read_rows(name, start, stop))


def logits_of(target, prompt):
    """Returns the logits of all tokens of a prompt."""
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(prompt))], [0])
    return target.forward(TreeBatch.chains([prompt], target.device), cache, batch).scores
