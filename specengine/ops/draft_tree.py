"""EAGLE's draft of a tree on the CPU: one native call from the true pairs to the nodes that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import torch

from specengine import _C
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.ops.decoder import Decoder, native_projection
from specengine.ops.weight import Projection, Weight


class CachedPairs(Protocol):
    """The pairs that are cached for each request of a batch."""

    @property
    def block_table(self) -> torch.Tensor: ...

    @property
    def lengths(self) -> torch.Tensor: ...


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


@dataclass(frozen=True)
class Thresholds:
    """What of a tree is not worth its time; csrc/ops/draft_tree.h has the expectations.

    level_tokens: that a further level must be expected to add, the sum over the requests.
    reach: least probability of a node that is kept.
    """

    level_tokens: float = 0.0
    reach: float = 0.0


@dataclass(frozen=True)
class _Outputs:
    """Outputs of one batch size, and numpy's views of them, which become lists in less time."""

    trees: _C.DraftedTrees
    arrays: tuple[np.ndarray, ...]

    @staticmethod
    def empty(batch: int, nodes: int) -> _Outputs:
        arrays = (
            np.zeros((batch, nodes), dtype=np.int32),
            np.zeros((batch, nodes), dtype=np.int32),
            np.zeros((batch, nodes), dtype=np.float32),
            np.zeros(batch, dtype=np.int32),
            np.zeros(batch, dtype=np.int32),
        )
        return _Outputs(_C.DraftedTrees(*map(torch.from_numpy, arrays)), arrays)


class TreeDraft:
    """Drafts with one network.

    top_k: children of a node.  beam: nodes of a level that have children; 1: a chain with leaves.
    nodes: of a tree at most, root included.
    """

    def __init__(self, weights: EagleWeights, top_k: int, beam: int, nodes: int) -> None:
        self._top_k, self._beam, self._nodes = top_k, beam, nodes
        self._weights = _C.EagleWeights(
            decoder=weights.decoder.native,
            embedding=weights.embedding.data,
            embedding_norm=weights.embedding_norm,
            hidden_state_norm=weights.hidden_state_norm,
            fuse=_C.Projection((), (), None) if weights.fuse is None else native_projection(weights.fuse),
            before_residual=weights.before_residual,
            feed_back=weights.feed_back,
            head=native_projection(weights.head),
            vocabulary=weights.vocabulary,
        )
        self._outputs: dict[int, _Outputs] = {}  # by requests: after a target's pass, fresh memory misses every cache

    def __call__(
        self,
        runs: Sequence[Sequence[int]],
        hidden_states: torch.Tensor,
        place: CachedPairs,
        pool: KeysAndValues,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        limits: Sequence[int],
        levels: int,
        least: Thresholds = Thresholds(),
    ) -> tuple[list[ScoredTree], int]:
        """Returns each request's tree in the target's tokens, nodes level by level, and the levels that were drafted.

        runs: tokens of the true pairs of each request, at least one; the last one is the root.
        hidden_states: float32 [M, columns] or [M, states, columns] of all pairs.  place: the pairs before them.
        limits: deepest level of each tree.  levels: at most.
        Raises ValueError as a decoder does, and for logits that are no distribution.
        """
        batch = len(runs)
        outputs = self._outputs.get(batch)
        if outputs is None:
            outputs = self._outputs[batch] = _Outputs.empty(batch, self._nodes)
        cos, sin = cos_sin
        starts = [*accumulate(map(len, runs), initial=0)]
        _C.draft_tree(
            self._weights,
            _ints(runs[0] if batch == 1 else [*chain(*runs)]),
            hidden_states,
            _C.KVCacheView(pool.k, pool.v, place.block_table, place.lengths, _ints(starts), 0),
            cos,
            sin,
            levels,
            self._top_k,
            self._beam,
            least.level_tokens,
            least.reach,
            _ints(limits),
            outputs.trees,
        )
        tokens, parents, chances, counts, (grown, *_) = (array.tolist() for array in outputs.arrays)
        trees = [
            ScoredTree(tokens[b][:count], parents[b][:count], chances[b][:count]) for b, count in enumerate(counts)
        ]
        return trees, grown


def _ints(values: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int32))
