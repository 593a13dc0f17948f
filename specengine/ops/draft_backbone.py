"""EAGLE-3's draft of a backbone with leaves on the CPU: one native call from the true pairs to the last level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Protocol

import numpy as np
import torch

from specengine import _C
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
class BackboneNetwork:
    """The weights of an EAGLE-3 drafter.

    decoder: made with first_columns twice the hidden size and the last layer's output as its only hidden_state_layers.
    embedding_norm, hidden_state_norm: of the halves of the first layer's input.  fuse: makes a pair's hidden state from
    several layers' states; None: the caller gives the hidden state.  before_residual: whether the residual stream is
    the normed hidden state.  feed_back: whether the next level reads the normed output.  vocabulary: int32 [Vd], the
    target's token of each row of the head; None: the same.
    """

    decoder: Decoder
    embedding: Weight
    embedding_norm: torch.Tensor
    hidden_state_norm: torch.Tensor
    fuse: Projection | None
    before_residual: bool
    feed_back: bool
    head: Projection
    vocabulary: torch.Tensor | None


class BackboneDraft:
    """Drafts with one network; top_k: children per level, of which the likeliest has children of its own."""

    def __init__(self, network: BackboneNetwork, top_k: int) -> None:
        self._top_k = top_k
        self._network = _C.BackboneNetwork(
            decoder=network.decoder.native,
            embedding=network.embedding.data,
            embedding_norm=network.embedding_norm,
            hidden_state_norm=network.hidden_state_norm,
            fuse=_C.Projection((), (), None) if network.fuse is None else native_projection(network.fuse),
            before_residual=network.before_residual,
            feed_back=network.feed_back,
            head=native_projection(network.head),
            vocabulary=network.vocabulary,
        )
        self._outputs: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}  # by requests and levels

    def __call__(
        self,
        runs: Sequence[Sequence[int]],
        hidden_states: torch.Tensor,
        place: CachedPairs,
        pool: KeysAndValues,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        levels: int,
        min_level_gain: float = 0.0,
    ) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """The likeliest tokens of every request's levels, as the target's ids, top_k each, and their log-probabilities.

        runs: tokens of the true pairs of each request, at least one.  hidden_states: float32 [M, columns] of all pairs.
        place: the pairs before them.  levels: at most.  min_level_gain: drafting stops before a level that is expected
        to lengthen a cycle's run by a smaller share; csrc/ops/draft_backbone.h has the expectation. The caller knows
        what a level costs and so chooses the threshold.
        Raises ValueError as a decoder does, and for logits that are no distribution.
        """
        starts = accumulate((len(run) for run in runs), initial=0)
        tokens, row_start = _ints(chain(*runs)), _ints(starts)
        children, scores, count = self._outputs_for(len(runs), levels)
        cos, sin = cos_sin
        cache = _C.KVCacheView(pool.k, pool.v, place.block_table, place.lengths, row_start, 0)
        _C.draft_backbone(
            self._network, tokens, hidden_states, cache, cos, sin, min_level_gain, children, scores, count
        )
        (reached, *_) = count.tolist()
        return [b[:reached] for b in children.tolist()], [b[:reached] for b in scores.tolist()]

    def _outputs_for(self, batch: int, levels: int) -> tuple[torch.Tensor, ...]:
        """Outputs made once per shape: after a target's pass, fresh memory would miss every cache."""
        if (batch, levels) not in self._outputs:
            shape = (batch, levels, self._top_k)
            self._outputs[batch, levels] = (
                torch.zeros(shape, dtype=torch.int32),
                torch.zeros(shape),
                torch.zeros(batch, dtype=torch.int32),
            )
        return self._outputs[batch, levels]


def _ints(values: Iterable[int]) -> torch.Tensor:
    return torch.from_numpy(np.array([*values], dtype=np.int32))
