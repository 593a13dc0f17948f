"""Cuts scored candidates to a tree of N nodes: the rerank of EAGLE-2 and -3, and a drafter's tree cut to a fixed width.

For captured cycles draft_policy/widths.py chooses N, through engine/device/cycle_graphs.py. On the CPU EAGLE's
option `nodes` is N; after this rerank cut_trees keeps the nodes that pay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, parents, depths, scores


@dataclass(frozen=True)
class SelectedTrees:
    """Selected trees.

    tokens, parents, depths: int32 [B, N].  kept: int32 [B, N], each node's candidate.  ancestors: int32 bits [B, N, W].
    node_counts: int32 [B]; past it ancestors are 0, the rest -1.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    kept: torch.Tensor
    ancestors: torch.Tensor
    node_counts: torch.Tensor

    @staticmethod
    def empty(batch: int, nodes: int, device: torch.device | str = "cpu") -> SelectedTrees:
        """Room for `nodes` nodes (root included) per request."""

        def padding(*shape: int, value: int = -1) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        tokens, parents, depths, kept = (padding(batch, nodes) for _ in range(4))
        ancestors = padding(batch, nodes, -(-nodes // 32), value=0)
        return SelectedTrees(tokens, parents, depths, kept, ancestors, padding(batch, value=0))


def select_nodes(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    limits: torch.Tensor,
    trees: SelectedTrees,
) -> SelectedTrees:
    """Writes to `trees` each request's root and the N - 1 candidates with the highest scores (EAGLE-2 sec. 4.2).

    Ties go to the lower index. Nodes stay in the order of the candidates.

    tokens, parents (an earlier candidate; candidate 0 is the root with parent -1), depths (root 0; -1: no candidate):
    int32 [B, M].  scores: float32 [B, M], cumulative log-probabilities; candidates of -inf are kept last.
    limits: int32 [B], the deepest depth to keep; negative: the request is idle and gets no nodes.
    The call allocates nothing, so that a CUDA graph can hold it.
    Raises ValueError for NaN, a child that scores above its parent, a parent that is no earlier candidate, and a depth
    other than one below its parent's. On CUDA NaN gives a node count of -1 and no nodes; in other invalid trees the
    candidates without a kept parent are dropped.
    """
    _C.select_nodes(
        tokens,
        parents,
        depths,
        scores,
        limits,
        trees.tokens,
        trees.parents,
        trees.depths,
        trees.kept,
        trees.ancestors,
        trees.node_counts,
    )
    return trees


def select_limited(
    columns: Columns,
    known: torch.Tensor,
    length: torch.Tensor,
    final_length: torch.Tensor,
    active: torch.Tensor,
    levels: int,
    trees: SelectedTrees,
) -> SelectedTrees:
    """Writes to `trees` what select_nodes selects, with limits that the device alone knows.

    known: int32 [B], 0: nothing but the root.  length, final_length: int32 [B], of the history, and where the request
    ends: a tree has no level that could not be committed.  active: int32 [B], 0: idle.  levels: at most.
    Raises ValueError for negative levels.
    """
    written = _C.SelectedTrees(
        trees.tokens, trees.parents, trees.depths, trees.kept, trees.ancestors, trees.node_counts
    )
    _C.select_limited(_C.CandidateColumns(*columns), known, length, final_length, active, written, levels)
    return trees


def select_nodes_reference(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    scores: torch.Tensor,
    limits: torch.Tensor,
    nodes: int,
) -> SelectedTrees:
    """select_nodes as on CUDA, for invalid trees too."""
    batch = len(limits)
    trees = SelectedTrees.empty(batch, nodes, tokens.device)
    for b in range(batch):
        if limits[b] < 0 or depths[b, 0] != 0:
            continue
        exists = depths[b] >= 0
        if scores[b][exists].isnan().any():
            trees.node_counts[b] = -1
            continue
        selectable = exists & (depths[b] <= limits[b])
        selectable[0] = False
        order = scores[b].sort(descending=True, stable=True).indices
        best = order[selectable[order]][: nodes - 1].sort().values.tolist()
        node_of: dict[int, int] = {}
        masks: list[int] = []  # ancestor bits as integers of any width
        for i in [0, *best]:
            parent = node_of.get(int(parents[b, i]), -1)
            if i > 0 and parent < 0:
                continue
            node = node_of[i] = len(masks)
            masks.append((masks[parent] if i > 0 else 0) | 1 << node)
            trees.tokens[b, node], trees.parents[b, node] = tokens[b, i], parent
            trees.depths[b, node], trees.kept[b, node] = depths[b, i], i
            for word in range(trees.ancestors.shape[2]):
                value = masks[node] >> 32 * word & 0xFFFFFFFF
                trees.ancestors[b, node, word] = value - (1 << 32) if value >> 31 else value
        trees.node_counts[b] = len(masks)
    return trees
