"""Trees that follow the drafter's confidence, level by level (EAGLE-2, sections 4.1 and 4.2).

Candidates are numbered level by level: `top_k` children of the root, then in each level the children of the `top_k`
nodes that were expanded, in their order. A score is the sum of log-probabilities from the root on; none is above its
parent's, and of equal ones the earlier counts as better, so the best candidates are a tree whatever their number.

Shapes: B sequences, k = top_k, C candidates.
"""

from __future__ import annotations

import torch


class DynamicTrees:
    """The candidates of B trees while they grow.

    tokens: int32, scores: float32, parents: int64, all [B, C]; a parent is a candidate, -1 the root.
    beam: int64 [B, w], the candidates to be expanded next, best first.  ends: candidates after each level.
    """

    def __init__(self, tokens: torch.Tensor, scores: torch.Tensor) -> None:
        """tokens, scores: [B, k], the root's children, likeliest first."""
        self.tokens, self.scores = tokens, scores
        self.parents = torch.full(tokens.shape, -1, device=tokens.device)
        self.top_k = tokens.shape[1]
        self.beam = torch.arange(self.top_k, device=tokens.device).expand(len(tokens), -1)
        self.ends = [self.top_k]

    def grow(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Adds a level; returns where in the old beam the parents of the new one are, int64 [B, k].

        tokens, scores: [B, w, k], of the children of each beam node, likeliest first.
        """
        level = (self.scores.gather(1, self.beam)[..., None] + scores).flatten(1)
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], dim=1)
        self.scores = torch.cat([self.scores, level], dim=1)
        self.parents = torch.cat([self.parents, self.beam.repeat_interleave(self.top_k, dim=1)], dim=1)
        best = best_first(level)[:, : self.top_k]
        self.beam = self.ends[-1] + best
        self.ends.append(self.tokens.shape[1])
        return best // self.top_k


def best_first(scores: torch.Tensor) -> torch.Tensor:
    """int64 [B, C]: candidates by falling score, equal ones in their order."""
    return scores.argsort(dim=1, descending=True, stable=True)


def number_nodes(
    scores: torch.Tensor, parents: torch.Tensor, allowed: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best `count` candidates as nodes of a tree: the node of each candidate and of its parent, int64 [B, C].

    0 is the root, and no node; nodes are numbered in the order of the candidates.  scores, parents: [B, C] of
    DynamicTrees.  allowed: int64 [B], only so many first candidates count.
    """
    place = torch.arange(scores.shape[1], device=scores.device)
    rank = best_first(scores.masked_fill(place >= allowed[:, None], -torch.inf)).argsort(dim=1)
    chosen = (rank < count) & (place < allowed[:, None])
    nodes = chosen.cumsum(1) * chosen
    above = nodes.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, 0)
    return nodes, above
