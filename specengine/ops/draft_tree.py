"""EAGLE's draft of a tree on the CPU: one native call from the true pairs to the nodes that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from specengine import _C
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.ops.decoder import Decoder, native_projection
from specengine.ops.weight import Projection, Weight


class KeysAndValues(Protocol):
    """The drafter's cache: k and v, [layers, pages, K, PAGE_SIZE, D] each."""

    @property
    def k(self) -> torch.Tensor: ...

    @property
    def v(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class EagleWeights:
    """The weights of an EAGLE drafter; csrc/ops/draft_tree.h says what they do.

    decoder: made with the last layer's output as its only hidden_state_layers, and for EAGLE-3 with first_columns twice
    the hidden size.  embedding_norm, hidden_state_norm: of the halves of the first layer's input; None: EAGLE-1.
    fuse: of EAGLE-3 makes a pair's hidden state from several layers' states; None: the caller gives the hidden state.
    Of EAGLE-1 it makes the first layer's input.  before_residual: whether the residual stream is the normed hidden
    state.  feed_back: whether the next level reads the normed output.  vocabulary: int32 [Vd], the target's token of
    each row of the head; None: the same.
    """

    decoder: Decoder
    embedding: Weight
    embedding_norm: torch.Tensor | None
    hidden_state_norm: torch.Tensor | None
    fuse: Projection | None
    before_residual: bool
    feed_back: bool
    head: Projection
    vocabulary: torch.Tensor | None


class Thresholds(NamedTuple):
    """What of a tree is not worth its time; csrc/ops/draft_tree.h has the expectations.

    min_gain: that a further level must be expected to add, the sum over the requests.
    reach: least probability of a node that is kept.
    """

    min_gain: float = 0.0
    reach: float = 0.0


WHOLE = Thresholds()  # the largest tree


class TreeDraft:
    """Drafts with one network.

    top_k: children of a node.  beam: nodes of a level that have children; 1: a chain with leaves.
    nodes: of a tree at most, root included.
    """

    def __init__(self, weights: EagleWeights, top_k: int, beam: int, nodes: int) -> None:
        self.sizes = (top_k, beam, nodes)
        self.weights = _C.EagleWeights(
            decoder=weights.decoder.native,
            embedding=weights.embedding.data,
            embedding_norm=weights.embedding_norm,
            hidden_state_norm=weights.hidden_state_norm,
            fuse=_C.Projection((), (), None, None, False) if weights.fuse is None else native_projection(weights.fuse),
            before_residual=weights.before_residual,
            feed_back=weights.feed_back,
            head=native_projection(weights.head),
            vocabulary=weights.vocabulary,
        )

    def fetch(self) -> None:
        """Lets threads that wait bring the weights near, for a draft that follows soon; returns at once."""
        self.weights.fetch()

    def __call__(
        self,
        runs: Sequence[Sequence[int]],
        hidden_states: torch.Tensor,
        rows: Sequence[int],
        pages: Sequence[Sequence[int]],
        cached: Sequence[int],
        pool: KeysAndValues,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        limits: Sequence[int],
        levels: int,
        least: Thresholds = WHOLE,
    ) -> tuple[list[ScoredTree], int]:
        """Returns each request's tree in the target's tokens, nodes level by level, and the levels that were drafted.

        runs: tokens of the true pairs of each request, at least one; the last one is the root.
        hidden_states: float32 [R, columns] or [R, states, columns].  rows: those of all pairs.  pages: of each request.
        cached: pairs before these.  limits: deepest level of each tree.  levels: at most.
        Raises ValueError as a decoder does, and for logits that are no distribution.
        """
        place = (pages, cached, pool.k, pool.v, *cos_sin)
        trees, drafted = self.weights.draft(runs, hidden_states, rows, *place, limits, (levels, *self.sizes), least)
        return [ScoredTree(*tree) for tree in trees], drafted
