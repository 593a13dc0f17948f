"""Trees that grow level by level, all requests together: chains, and trees of the likeliest nodes of every level."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count as counted
from math import exp

import torch

from specengine.draft_trees.dynamic import DynamicTrees
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters.block.head import OpenDraft
from specengine.ops.growth.level_trees import GrowingTrees, GrowthPlan
from specengine.ops.select_nodes import SelectedTrees, select_nodes

Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, parents, depths, scores


def grow_levels(draft: OpenDraft, roots: torch.Tensor, levels: int, beam: int, min_gain: float = 0.0) -> DynamicTrees:
    """Returns the candidates of B trees of at most `levels` levels.

    roots: int32 [B].  beam: nodes expanded per level.  min_gain: as propose() takes it.
    """
    batch = len(roots)
    owners = torch.arange(batch, device=roots.device)
    children = draft.children(0, owners, roots, None)
    trees = DynamicTrees(children.tokens, children.scores, beam)
    above = torch.zeros_like(trees.beam)
    for level in range(1, levels):
        if min_gain and not _pays(trees, min_gain):
            break
        width = trees.beam.shape[1]
        places = above[:, :width]
        memory = children.memory
        if memory is not None:
            columns = memory.shape[1]
            own = memory.view(batch, -1, columns)
            memory = own.gather(1, places[..., None].expand(-1, -1, columns)).flatten(0, 1)
        children = draft.children(level, owners.repeat_interleave(width), trees.opened.flatten(), memory)
        shape = (batch, width, -1)
        above = trees.grow(children.tokens.view(shape), children.scores.view(shape))
    return trees


def grow_captured(
    draft: OpenDraft, plan: GrowthPlan, roots: torch.Tensor, known: torch.Tensor, token_ids: torch.Tensor | None
) -> Columns:
    """Returns the same candidates and their roots inside a captured cycle, as columns of select_nodes.

    roots: int32 [B, 1].  known: int32 [B], 0: nothing is drafted for the request.  token_ids: as GrowingTrees takes it.
    """
    trees = GrowingTrees(plan, roots, known, token_ids)
    tokens, memory, above = roots.view(-1), None, None
    for level in counted():
        rows, memory = draft.grow(trees, level, tokens, memory, above)
        if rows is None:
            return trees.columns
        tokens, above = rows.tokens, None if rows.in_place else rows.above
    raise AssertionError  # a plan has a last level


def draft_chains(draft: OpenDraft, roots: torch.Tensor, levels: int) -> list[tuple[list[int], list[float]]]:
    """Returns tokens and chances of the likeliest child of every level, for each root, int32 [B]."""
    owners = torch.arange(len(roots), device=roots.device)
    tokens, memory = roots, None
    drafted, chances = [], []
    for level in range(levels):
        children = draft.children(level, owners, tokens, memory)
        tokens, memory = children.tokens[:, 0].contiguous(), children.memory
        drafted.append(tokens.tolist())
        chances.append(children.chances[:, 0].tolist())
    return list(zip(map(list, zip(*drafted, strict=True)), map(list, zip(*chances, strict=True)), strict=True))


def chain_tree(root: int, tokens: Sequence[int], chances: Sequence[float], threshold: float) -> ScoredTree:
    """Returns a chain that ends before the first token whose chance is below the threshold."""
    count = next((number for number, chance in enumerate(chances) if chance < threshold), len(tokens))
    return ScoredTree([root, *tokens[:count]], [*range(-1, count)], [1.0, *chances[:count]])


def best_trees(trees: DynamicTrees, roots: torch.Tensor, limits: Sequence[int], nodes: int) -> list[ScoredTree]:
    """Returns the best `nodes` - 1 candidates below each root, int32 [B]. limits: the deepest level of each."""
    tokens, parents, depths, scores = trees.rooted(roots[:, None])
    room = SelectedTrees.empty(len(roots), nodes, roots.device)
    deepest = torch.tensor(limits, dtype=torch.int32, device=roots.device)
    best = select_nodes(tokens, parents, depths, scores, deepest, room)
    columns = (best.node_counts, best.tokens, best.parents, best.kept, scores)
    found = []
    for count, own, above, kept, reached in zip(*(column.tolist() for column in columns), strict=True):
        log = [reached[candidate] for candidate in kept[:count]]
        chances = [exp(score - log[max(0, parent)]) for score, parent in zip(log, above[:count], strict=True)]
        found.append(ScoredTree(own[:count], above[:count], chances))
    return found


def _pays(trees: DynamicTrees, min_gain: float) -> bool:
    """Returns whether one more level is expected to add enough tokens: it is accepted as often as the ones before."""
    depth = len(trees.ends)
    reached = (min(1.0, sum(map(exp, row))) for row in trees.reached.tolist())
    return sum(chance ** (1 + 1 / depth) for chance in reached) >= min_gain
