"""Trees of drafted tokens: one request's tree, and the batch of trees that the target verifies in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from itertools import count as numbers
from operator import lt

import numpy as np
import torch

from specengine._C import MAX_NODES, TreeRows
from specengine.draft_trees.scored_tree import tree_levels
from specengine.utils.host_memory import is_host, put_ints

KEPT = 256  # sizes of batches whose tensors a layout keeps
_CHAIN = [*range(-1, MAX_NODES - 1)]  # parents


@dataclass(frozen=True)
class DraftTree:
    """One request's proposal: node 0 is the root (parent -1), every other node's parent is an earlier node.

    Plain decoding is the root alone: DraftTree([root], [-1]).
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if len(self.parents) != count or not 1 <= count <= MAX_NODES:
            raise ValueError(f"tree: expected 1 to {MAX_NODES} nodes with one parent each, got {count}")
        if self.parents[0] == -1 and all(map(lt, self.parents, range(count))) and min(self.parents[1:], default=0) >= 0:
            return
        for node, parent in enumerate(self.parents):
            if parent != -1 if node == 0 else not 0 <= parent < node:
                raise ValueError(f"tree: parent of node {node} is {parent}, expected an earlier node (-1 for the root)")

    @property
    def levels(self) -> int:
        """Depth of the deepest node."""
        return tree_levels(self.parents)

    def accepted(self, committed: Sequence[int]) -> int:
        """Returns how many nodes the committed tokens run through."""
        children = dict(zip(zip(self.parents, self.tokens, strict=True), numbers(), strict=False))
        node = count = 0
        for token in committed:
            node = children.get((node, token), 0)
            if not node:
                break
            count += 1
        return count


@dataclass(frozen=True)
class TreeBatch:
    """The rows of one target pass: all nodes of all requests, one after the other.

    tokens, parents, depths: int32 [M].  row_start: int32 [B + 1].
    ancestors: int32 bits [M, W], or None when every request's rows are a chain (prefill, plain decoding).
    nodes: rows of the longest request, which the host must know without asking the device.
    starts: row_start on the host; None where only the device knows it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor | None
    nodes: int
    starts: Sequence[int] | None = None

    @staticmethod
    def of(trees: Sequence[DraftTree], device: torch.device, *, masked: bool = False) -> TreeBatch:
        """Lays out one tree per request.  masked: with ancestor bits even where all trees are chains."""
        if not masked and all(parent == node - 1 for tree in trees for node, parent in enumerate(tree.parents)):
            return TreeBatch.chains([tree.tokens for tree in trees], device)
        tokens = [token for tree in trees for token in tree.tokens]
        parents = [parent for tree in trees for parent in tree.parents]
        depths: list[int] = []
        masks: list[int] = []  # ancestor bits as integers of any width
        for tree in trees:
            first = len(depths)
            for node, parent in enumerate(tree.parents):
                depths.append(depths[first + parent] + 1 if node else 0)
                masks.append((masks[first + parent] if node else 0) | 1 << node)
        starts = list(accumulate((len(tree.tokens) for tree in trees), initial=0))
        ancestors = _pack(masks, max((len(tree.tokens) for tree in trees), default=1))
        return TreeBatch._on(device, tokens, parents, depths, starts, ancestors)

    @staticmethod
    def chains(runs: Sequence[Sequence[int]], device: torch.device, *, masked: bool = False) -> TreeBatch:
        """Lays out one chain per request, of any length: prefill.

        masked: with ancestor bits, unless a chain is longer than a tree may be. Without them attention on CUDA is that
        of prefill.
        """
        tokens = [token for run in runs for token in run]
        depths = [depth for run in runs for depth in range(len(run))]
        starts = list(accumulate((len(run) for run in runs), initial=0))
        longest = max(map(len, runs), default=0)
        ancestors = _pack([(2 << depth) - 1 for depth in depths], longest) if masked and longest <= MAX_NODES else None
        return TreeBatch._on(device, tokens, [depth - 1 for depth in depths], depths, starts, ancestors)

    @staticmethod
    def _on(device, tokens, parents, depths, starts, ancestors) -> TreeBatch:
        columns = [tokens, parents, depths, starts, *([] if ancestors is None else [ancestors])]
        arrays = [np.array(values, dtype=np.int32) for values in columns]
        token_ids, above, levels, row_start, *bits = put_ints(arrays, device)
        nodes = max((end - begin for begin, end in pairwise(starts)), default=0)
        return TreeBatch(token_ids, above, levels, row_start, bits[0] if bits else None, nodes, starts)


class TreeLayout:
    """Lays out the trees of one batch, cycle after cycle; on the CPU, one call writes trees of sizes that were there.

    Between two passes the processor's caches are full of weights: new tensors take longer than writing some numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._written: dict[tuple[int, int, int, bool], tuple[TreeBatch, TreeRows]] = {}  # by sizes and mask

    def of(self, trees: Sequence[DraftTree]) -> TreeBatch:
        """Returns the trees' batch, which is valid until the next call."""
        if not is_host(self._device):
            return TreeBatch.of(trees, self._device)
        tokens, parents = [tree.tokens for tree in trees], [[*tree.parents] for tree in trees]
        sizes = [len(own) for own in parents]
        size = len(sizes), sum(sizes), max(sizes, default=0), any(own != _CHAIN[: len(own)] for own in parents)
        if size in self._written:
            batch, rows = self._written[size]
            rows.write(tokens, parents)
            return batch
        if len(self._written) == KEPT:
            self._written.clear()
        batch = TreeBatch.of(trees, self._device)
        columns = batch.tokens, batch.parents, batch.depths, batch.row_start, batch.ancestors
        self._written[size] = batch, TreeRows(*columns)
        return batch


@dataclass(frozen=True)
class DraftLogits:
    """The distributions that the children of drafted nodes come from, before the sampling parameters.

    logits: float32 [R, Vd].  rows: int32 [M], the row of `logits` of each node of a TreeBatch, -1: none is known.
    index: int32 [V], the column of each token of the target, -1: not in the drafter's vocabulary; None: both
    vocabularies are the same.
    replacement: whether siblings were drawn with replacement.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    index: torch.Tensor | None = None
    replacement: bool = False

    def to(self, device: torch.device) -> DraftLogits:
        """Returns the same on another device."""
        index = None if self.index is None else self.index.to(device)
        return DraftLogits(self.logits.to(device), self.rows.to(device), index, self.replacement)


def _pack(masks: Sequence[int], nodes: int) -> np.ndarray:
    words = (nodes + 31) // 32
    data = b"".join(mask.to_bytes(4 * words, "little") for mask in masks)
    return np.frombuffer(data, dtype="<i4").reshape(len(masks), words)
