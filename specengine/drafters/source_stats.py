"""Counts, for a tree made of several sources' trees, the nodes that each source drafted and had accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specengine import _C
from specengine.draft_trees.scored_tree import Tree
from specengine.drafters.engine_views import DraftRequest
from specengine.types import SourceStats


def count_sources(
    request: DraftRequest,
    tree: Tree,
    sources: Sequence[tuple[str, Tree]],
    committed: Sequence[int],
) -> None:
    """Adds a cycle's verified and accepted nodes of each source to a request's statistics and trace.

    tree: the verified tree.  sources: names and trees with the same root.
    """
    if len(tree.tokens) > 1:
        accepted = committed[: request.accepted_last]
        columns = [(name, source.tokens, source.parents) for name, source in sources]
        record_counts(request, _C.count_sources(tree.tokens, tree.parents, columns, accepted))


def record_counts(request: DraftRequest, counts: Sequence[tuple[str, int, list[int]]]) -> None:
    """Adds counted nodes to a request's statistics and trace.

    counts: each source's name, its verified nodes, and which of the accepted nodes, numbered from 0 on, are its own.
    """
    for name, drafted, accepted in counts:
        stats = request.sources.setdefault(name, SourceStats())
        stats.drafted += drafted
        stats.accepted += len(accepted)
    if request.trace:
        path = range(request.accepted_last)
        names = tuple(tuple(name for name, _, accepted in counts if node in accepted) for node in path)
        request.trace[-1] = replace(request.trace[-1], sources=names)
