"""A request as one part of a combination sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree


@dataclass
class State:
    """What the combination remembers of one request.

    parts: each part's own state.  tree: the last draft.  sources: the trees that it was made of, with their parts'
    names.
    """

    parts: list[Any]
    tree: DraftTree | None = None
    sources: list[tuple[str, ScoredTree]] = field(default_factory=list)


class PartView:
    """Shows a request to one part, with that part's own `drafter_state`."""

    def __init__(self, request: Any, part: int) -> None:
        self._request = request
        self._part = part

    @property
    def drafter_state(self) -> Any:
        return self._request.drafter_state.parts[self._part]

    @drafter_state.setter
    def drafter_state(self, state: Any) -> None:
        self._request.drafter_state.parts[self._part] = state

    @property
    def tokens(self) -> list[int]:
        return self._request.tokens  # found at once: __getattr__ is asked only after all else

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
