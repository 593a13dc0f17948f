"""A drafter that computes the distributions of a level's children gives them to every rule that wants them.

A tree has a fixed shape. It grows level by level: the drafter computes logits behind the open nodes, and their children
are drawn or are the likeliest tokens. Nothing about a node's children but the distribution itself is known when their
number is fixed, so no rule is biased.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

from specengine.draft_policy.draft import Draft
from specengine.draft_trees.tree import DraftLogits
from specengine.draft_trees.tree_shape import TreeShape
from specengine.drafters.capabilities import LogitsDrafter
from specengine.drafters.distributions.columns import Columns
from specengine.drafters.distributions.growth import Choice, Growth, drawn_children, likeliest_children
from specengine.drafters.engine_views import DraftRequest
from specengine.ops.row_tools import stack_rows
from specengine.rules.base import Wants

# level_logits(trees with open nodes, level) -> float32 [R, Vd], of all open nodes, tree after tree
LevelLogits = Callable[[Sequence[Growth], int], torch.Tensor]


class LevelDistributions(LogitsDrafter):
    """Draws children, or hands over their probabilities, from the logits of one level after another.

    shape: of its trees.  columns: of its logits.  logits_device: where they lie.
    samples: whether it draws for rules that take deterministic children too.
    replacement: whether it draws siblings with replacement.
    """

    shape: TreeShape
    columns: Columns
    logits_device: torch.device
    samples: bool = True
    replacement: bool = False

    @abstractmethod
    def levels_for(self, request: DraftRequest) -> int:
        """Returns the levels worth drafting for a request; 0: it has none of what a draft needs."""

    @abstractmethod
    def begin_levels(self, trees: Sequence[Growth]) -> LevelLogits:
        """Begins a draft; returns what computes the logits of its levels. trees: roots, one or more."""

    def most_children(self, logits: torch.Tensor, widths: Sequence[int]) -> list[int]:
        """Returns how many children each row gets. logits: [R, Vd].  widths: what the shape has."""
        return list(widths)

    def gives_logits(self, wants: Wants) -> bool:
        return wants in (Wants.SAMPLED_ONLY, Wants.PROBABILITIES) or (wants is Wants.SAMPLES and self.samples)

    def draft_with_logits(self, requests: Sequence[DraftRequest], sampled: bool) -> Draft:
        device, columns, choose = self.logits_device, self.columns, likeliest_children(self.columns)
        if sampled:
            choose = drawn_children(requests, self.replacement, columns, device)
        trees, logits = self.grow_levels(requests, choose)
        rows = torch.tensor([row for growth in trees for row in growth.rows], dtype=torch.int32, device=device)
        found = DraftLogits(stack_rows(logits), rows, columns.index, self.replacement)
        return Draft(requests, [growth.tree for growth in trees], found)

    def room_for_logits(self, nodes: int) -> DraftLogits:
        device, columns = self.logits_device, self.columns
        rows = torch.full((nodes,), -1, dtype=torch.int32, device=device)
        return DraftLogits(torch.zeros(nodes, columns.count, device=device), rows, columns.index, self.replacement)

    def grow_levels(self, requests: Sequence[DraftRequest], choose: Choice) -> tuple[list[Growth], list[torch.Tensor]]:
        """Returns the trees of a batch, and the logits [R, Vd] that the children of each level were chosen from."""
        trees = [Growth(s, b, self.levels_for(s), [s.tokens[-1]]) for b, s in enumerate(requests)]
        found = [torch.empty(0, self.columns.count, device=self.logits_device)]
        children, known = self.shape.children, 0
        growing = [growth for growth in trees if growth.depth > 0]
        level_logits = self.begin_levels(growing) if growing else None
        for level in range(self.shape.levels):
            growing = [growth for growth in growing if growth.open and level < growth.depth]
            if not growing or level_logits is None:
                break
            logits = level_logits(growing, level)
            nodes = [(growth.slot, node) for growth in growing for node in growth.open]
            counts = self.most_children(logits, [len(children[trees[slot].places[node]]) for slot, node in nodes])
            chosen = choose(logits, nodes, trees, max(1, *counts))
            for growth in growing:
                growth.open = []
            for (slot, node), tokens, count in zip(nodes, chosen, counts, strict=True):
                growth = trees[slot]
                growth.rows[node] = known
                known += 1
                for place, token in zip(children[growth.places[node]][:count], tokens, strict=False):
                    child = growth.add(node, token, place)
                    growth.open += [child] if children[place] else []
            found.append(logits)
        return trees, found
