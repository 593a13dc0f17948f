"""Counts, for a tree made of several sources' trees, the nodes that each source drafted and had accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.engine_views import DraftRequest
from specengine.types import SourceStats


def count_sources(
    request: DraftRequest,
    tree: DraftTree | None,
    sources: Sequence[tuple[str, ScoredTree]],
    committed: Sequence[int],
) -> None:
    """Adds a cycle's verified and accepted nodes of each source to a request's statistics and trace.

    tree: the verified tree; None: none was drafted.  sources: names and trees with the same root.
    """
    if tree is None or len(tree.tokens) == 1:
        return
    children: dict[tuple[int | None, int], int] = {
        child: node for node, child in enumerate(zip(tree.parents, tree.tokens, strict=True))
    }
    accepted: list[int | None] = [0]
    for token in committed[: request.accepted_last]:
        accepted.append(children.get((accepted[-1], token)))
    nodes: dict[str, set[int | None]] = {}
    for name, source in sources:
        places: list[int | None] = [0]  # in the tree
        for token, parent in zip(source.tokens[1:], source.parents[1:], strict=True):
            places.append(children.get((places[parent], token)))
        nodes.setdefault(name, set()).update(places)
    for name, held in nodes.items():
        held -= {0, None}
        stats = request.sources.setdefault(name, SourceStats())
        stats.drafted += len(held)
        stats.accepted += len(held.intersection(accepted))
    if request.trace:
        names = tuple(tuple(name for name, held in nodes.items() if node in held) for node in accepted[1:])
        request.trace[-1] = replace(request.trace[-1], sources=names)
