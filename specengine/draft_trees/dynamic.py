"""Trees that follow the drafter's confidence, level by level (EAGLE-2, sections 4.1 and 4.2).

Candidates are numbered level by level: `top_k` children of the root, then in each level the children of the nodes that
were expanded, in their order. A score is the sum of log-probabilities from the root on, so no score is above its
parent's. Of equal scores the earlier one is better. The best candidates are therefore a tree, whatever their number.

Shapes: B requests, k = top_k, w nodes expanded, C candidates.
"""

from __future__ import annotations

import torch


class DynamicTrees:
    """Holds the candidates of B trees while they grow.

    beam: int64 [B, w], which candidates of the last level are expanded next, best first.
    ends: number of candidates after each level.
    """

    def __init__(self, tokens: torch.Tensor, scores: torch.Tensor, beam: int) -> None:
        """Begins with the root's children. tokens: int32 [B, k], likeliest first.  scores: float32 [B, k], copied.

        beam: the most nodes expanded per level. The tokens are not copied: the caller must not overwrite them.
        """
        self.top_k, self._widest = tokens.shape[1], beam
        self._tokens = [tokens]
        self._scores = [scores.clone()]
        self._parents = [torch.full_like(tokens, -1)]
        self.beam = self._first_of(tokens)
        self.ends = [self.top_k]

    @property
    def opened(self) -> torch.Tensor:
        """The tokens of the beam, int32 [B, w]."""
        return self._tokens[-1].gather(1, self.beam)

    @property
    def reached(self) -> torch.Tensor:
        """The scores of the beam, float32 [B, w]."""
        return self._scores[-1].gather(1, self.beam)

    def grow(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Adds a level; returns the places in the old beam of the new beam's parents, int64 [B, w].

        tokens, scores: [B, w, k], the children of each beam node, likeliest first.
        """
        batch, width, _ = tokens.shape
        level = (self.reached[..., None] + scores).flatten(1)
        parents = self.beam.int() + (self.ends[-1] - self._tokens[-1].shape[1])
        self._tokens.append(tokens.flatten(1))
        self._scores.append(level)
        self._parents.append(parents[..., None].expand(-1, -1, self.top_k).reshape(batch, -1))
        self.ends.append(self.ends[-1] + level.shape[1])
        if width == 1:  # the children are in order
            self.beam = self._first_of(level)
            return torch.zeros_like(self.beam)
        self.beam = level.argsort(dim=1, descending=True, stable=True)[:, : self._widest]
        return self.beam // self.top_k

    def rooted(self, roots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns tokens, parents, depths and scores of the root and all candidates, [B, 1 + C] each, for select_nodes.

        roots: int32 [B, 1].
        """
        depths = [torch.full_like(tokens, level) for level, tokens in enumerate((roots, *self._tokens))]
        return (
            torch.cat([roots, *self._tokens], dim=1),
            torch.cat([torch.full_like(roots, -2), *self._parents], dim=1) + 1,
            torch.cat(depths, dim=1),
            torch.cat([torch.zeros_like(roots, dtype=torch.float32), *self._scores], dim=1),
        )

    def _first_of(self, level: torch.Tensor) -> torch.Tensor:
        return torch.arange(min(self._widest, self.top_k), device=level.device).expand(len(level), -1)
