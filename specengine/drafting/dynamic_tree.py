"""Trees that follow the drafter's confidence, level by level (EAGLE-2, sections 4.1 and 4.2).

Candidates are numbered level by level: `top_k` children of the root, then in each level the children of the `top_k`
nodes that were expanded, in their order. A score is the sum of log-probabilities from the root on; none is above its
parent's, and of equal ones the earlier counts as better, so the best candidates are a tree whatever their number.

Shapes: B sequences, k = top_k, C candidates.
"""

from __future__ import annotations

from itertools import pairwise

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

    def rooted(self, roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, parents, depths and scores of the root and all candidates, [B, 1 + C], as select_nodes reads them.

        roots: int32 [B, 1].
        """
        root, sizes = torch.zeros_like(roots), [0, *self.ends]
        levels = [torch.full_like(self.tokens[:, low:high], i + 1) for i, (low, high) in enumerate(pairwise(sizes))]
        return (
            torch.cat([roots, self.tokens], dim=1),
            torch.cat([root - 1, self.parents.int() + 1], dim=1),
            torch.cat([root, *levels], dim=1),
            torch.cat([root.float(), self.scores], dim=1),
        )


def best_first(scores: torch.Tensor) -> torch.Tensor:
    """int64 [B, C]: candidates by falling score, equal ones in their order."""
    return scores.argsort(dim=1, descending=True, stable=True)
