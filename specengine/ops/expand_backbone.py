"""Backbone expansion: makes the comb-shaped tree of FastEagle and CAPE from the logits of all draft levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine import _C
from specengine._C import VOCABULARY_PART


@dataclass(frozen=True)
class BackboneTrees:
    """Expanded trees.

    tokens, parents, depths: int32 [B, N].  scores: float32 [B, N].  ancestors: int32 bits [B, N, W].
    node_counts: int32 [B]; past it tokens, parents and depths are -1, the rest 0.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    scores: torch.Tensor
    ancestors: torch.Tensor
    node_counts: torch.Tensor

    @staticmethod
    def empty(batch: int, nodes: int, device: torch.device | str) -> BackboneTrees:
        """Room for `nodes` nodes (root included) per request."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return BackboneTrees(
            tokens=zeros(batch, nodes),
            parents=zeros(batch, nodes),
            depths=zeros(batch, nodes),
            scores=zeros(batch, nodes, dtype=torch.float32),
            ancestors=zeros(batch, nodes, -(-nodes // 32)),
            node_counts=zeros(batch),
        )


class BackboneExpander:
    """expand_backbone for one shape. Every call writes the same `trees`.

    Outputs, workspace and settings are allocated here. A call copies nothing from the host, so that a CUDA graph can
    hold it.
    """

    def __init__(
        self,
        batch: int,
        levels: int,
        vocab: int,
        widths: Sequence[int],
        thresholds: Sequence[float] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        widest, parts = max(widths, default=0), -(-vocab // VOCABULARY_PART)
        best = (batch, levels, parts, widest)
        self.trees = trees = BackboneTrees.empty(batch, 1 + levels * widest, device)
        self._written = _C.BackboneTrees(
            trees.tokens, trees.parents, trees.depths, trees.scores, trees.ancestors, trees.node_counts
        )
        self._settings = (
            torch.tensor(list(thresholds), dtype=torch.float32, device=device),
            torch.tensor(list(widths), dtype=torch.int32, device=device),
        )
        self._workspace = (
            torch.empty(best, dtype=torch.int32, device=device),
            torch.empty(best, dtype=torch.float32, device=device),
            torch.empty(best[:3], dtype=torch.float32, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    def __call__(
        self, logits: torch.Tensor, root: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> BackboneTrees:
        """token_ids: int32 [V], the tokens that trees have in place of those of the logits; None: the same."""
        _C.expand_backbone(logits, root, *self._settings, self._written, *self._workspace, token_ids)
        return self.trees


def expand_backbone(
    logits: torch.Tensor, root: torch.Tensor, widths: Sequence[int], thresholds: Sequence[float] = ()
) -> BackboneTrees:
    """Attaches each level's most likely tokens to the previous level's best one (FastEagle sec. 3, CAPE sec. 3.3).

    logits: float32 [B, T, V], T levels.  root: int32 [B], -1 for an idle request, which gets no nodes.
    Level t gets widths[c] nodes, c = number of thresholds below its highest probability: widths=[k] is FastEagle's
    constant k (k = 1: a chain); widths=[8, 6, 4, 2], thresholds=[0.3, 0.6, 0.8] is CAPE.
    Example, T = 2, widths=[2]: nodes root, a, b, c, d with parents -1, 0, 0, 1, 1; a is more likely than b.
    Raises ValueError for widths and thresholds that do not fit and for logits that are no distribution (NaN, say);
    on CUDA such logits give a node count of -1 and no node but the root.
    """
    batch, levels, vocab = logits.shape
    return BackboneExpander(batch, levels, vocab, widths, thresholds, logits.device)(logits, root)


def expand_backbone_reference(
    logits: torch.Tensor, root: torch.Tensor, widths: Sequence[int], thresholds: Sequence[float] = ()
) -> BackboneTrees:
    batch, levels, _ = logits.shape
    trees = BackboneTrees.empty(batch, 1 + levels * max(widths), logits.device)
    trees.tokens.fill_(-1), trees.parents.fill_(-1), trees.depths.fill_(-1)
    log_probs = logits.double().log_softmax(dim=-1)
    for b in range(batch):
        if root[b] < 0:
            continue
        nodes = [(int(root[b]), -1, 0, 0.0, 1)]  # token, parent, depth, score, ancestor bits
        backbone = 0
        for level in range(levels):
            row = log_probs[b, level]
            order = row.sort(descending=True, stable=True).indices.tolist()
            width = widths[sum(row[order[0]].exp().item() > t for t in thresholds)]
            parent, backbone = backbone, len(nodes)
            for token in order[:width]:
                bits = nodes[parent][4] | 1 << len(nodes)
                nodes.append((token, parent, level + 1, nodes[parent][3] + row[token].item(), bits))
        for i, (token, parent, depth, score, bits) in enumerate(nodes):
            trees.tokens[b, i], trees.parents[b, i], trees.depths[b, i] = token, parent, depth
            trees.scores[b, i] = score
            for word in range(trees.ancestors.shape[2]):
                value = bits >> 32 * word & 0xFFFFFFFF
                trees.ancestors[b, i, word] = value - (1 << 32) if value >> 31 else value
        trees.node_counts[b] = len(nodes)
    return trees
