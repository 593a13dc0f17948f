"""EAGLE-3's draft of a backbone with leaves on the CPU: one native call from the true pairs to the last level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch

from specengine import _C
from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.ops.decoder import Decoder, native_projection
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class BackboneNetwork:
    """What a draft runs. decoder: made with first_columns twice the hidden size and the last layer's output as its tap.

    embedding_norm, feature_norm: of the halves of the first layer's input.  fuse: makes a pair's hidden state of what the
    draft is given; None: it is given.  before_residual: whether the residual stream is the normed hidden state.
    feed_back: whether what is fed back is normed.  vocabulary: int32 [Vd], the target's token of each row of the head;
    None: the same.
    """

    decoder: Decoder
    embedding: Weight
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    fuse: Projection | None
    before_residual: bool
    feed_back: bool
    head: Projection
    vocabulary: torch.Tensor | None


class BackboneDraft:
    """top_k: children looked at per level; the likeliest one has children of its own."""

    def __init__(self, network: BackboneNetwork, top_k: int) -> None:
        self._network, self._top_k = network, top_k  # whose tensors the core borrows
        n, fuse = network, None if network.fuse is None else native_projection(network.fuse)
        self._weights = (n.decoder.native, n.embedding.data, n.embedding_norm, n.feature_norm, fuse)
        self._rest = (n.before_residual, n.feed_back, native_projection(n.head), n.vocabulary)
        self._outputs: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}  # by requests and levels

    def __call__(
        self,
        runs: Sequence[Sequence[int]],
        hidden_states: torch.Tensor,
        place: CacheBatch,
        pool: PagePool,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        levels: int,
        least: float = 0.0,
    ) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """The likeliest tokens of every request's levels, the target's ids, top_k each, and their log-probabilities.

        runs: tokens of the true pairs of each request, at least one.  hidden_states: float32 [M, columns] of all of them.
        place: the pairs before them.  levels: at most; there are fewer where another one is thought to lengthen a
        cycle's run by a smaller share than `least`. Raises ValueError as a decoder does, and for logits that are no
        distribution.
        """
        starts = accumulate((len(run) for run in runs), initial=0)
        tokens, row_start = _ints(chain(*runs)), _ints(starts)
        children, scores, count = self._outputs_for(len(runs), levels)
        _C.draft_backbone(
            *(*self._weights, *self._rest, tokens, hidden_states, pool.k, pool.v, place.block_table, place.lengths),
            *(row_start, *cos_sin, least, children, scores, count),
        )
        (reached, *_) = count.tolist()
        return [b[:reached] for b in children.tolist()], [b[:reached] for b in scores.tolist()]

    def _outputs_for(self, batch: int, levels: int) -> tuple[torch.Tensor, ...]:
        """Kept: fresh memory is a miss of every cache, behind a target's pass."""
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
