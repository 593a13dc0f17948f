"""A tree given as rank paths, drafted level by level: chooses the candidates of DynamicTrees to expand and to keep."""

from __future__ import annotations

import torch

from specengine.draft_trees.rank_paths import RankTree


class StaticTree:
    """Holds, for every level, the candidates that a rank tree expands and keeps.

    levels, nodes: of the tree, root included.  top_k: children of every expanded node, at least as many as any level
    expands.  beams: per level but the last, the candidates to expand and the places of their parents in the beam
    before, int64 [1, w] each.  kept: bool [1, 1 + C], the root and the candidates of the tree.
    """

    def __init__(self, tree: RankTree, device: torch.device) -> None:
        nodes = [*zip(tree.parents.tolist(), tree.depths.tolist(), tree.ranks.tolist(), strict=True)]
        parents = {parent for parent, _, _ in nodes}
        self.levels = max(depth for _, depth, _ in nodes)
        self.nodes = 1 + len(nodes)
        inner = [
            [i + 1 for i, (_, depth, _) in enumerate(nodes) if depth == level and i + 1 in parents]
            for level in range(1, self.levels)
        ]
        self.top_k = max(1 + max(rank for _, _, rank in nodes), *(len(beam) for beam in inner), 1)
        candidate: dict[int, int] = {}
        self.beams: list[list[torch.Tensor]] = []
        first = 0
        before = [0]  # the root
        for level in range(1, self.levels + 1):
            own = {i + 1: (parent, rank) for i, (parent, depth, rank) in enumerate(nodes) if depth == level}
            candidate |= {
                node: first + before.index(parent) * self.top_k + rank for node, (parent, rank) in own.items()
            }
            if level < self.levels:
                beam = inner[level - 1]
                places = [[candidate[node] - first for node in beam], [before.index(own[node][0]) for node in beam]]
                self.beams.append([torch.tensor([row], device=device) for row in places])
            first += len(before) * self.top_k
            before = inner[level - 1] if level < self.levels else []
        self.kept = torch.zeros(1, 1 + first, dtype=torch.bool, device=device)
        self.kept[0, [0, *(1 + place for place in candidate.values())]] = True
