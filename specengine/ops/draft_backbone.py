"""EAGLE-3's draft of a backbone with leaves on the CPU: one native call from the true pairs to the last level."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specengine import _C
from specengine.kv_cache import CacheBatch, PagePool
from specengine.ops.decoder import Decoder, Rows, native_projection
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class BackboneNetwork:
    """What a draft runs. decoder: made with first_columns twice the hidden size and the last layer's output as its tap.

    embedding_norm, feature_norm: of the halves of the first layer's input.  before_residual: whether the residual
    stream is the normed feature.  feed_back: whether what is fed back is normed.  vocabulary: int32 [Vd], the target's
    token of each row of the head; None: the same.
    """

    decoder: Decoder
    embedding: Weight
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    before_residual: bool
    feed_back: bool
    head: Projection
    vocabulary: torch.Tensor | None


class BackboneDraft:
    """top_k: children looked at per level; the likeliest one has children of its own."""

    def __init__(self, network: BackboneNetwork, top_k: int) -> None:
        self._network, self._top_k = network, top_k  # whose tensors the core borrows
        n = network
        self._weights = (n.decoder.native, n.embedding.data, n.embedding_norm, n.feature_norm)
        self._rest = (n.before_residual, n.feed_back, native_projection(n.head), n.vocabulary)

    def __call__(
        self,
        rows: Rows,
        features: torch.Tensor,
        place: CacheBatch,
        pool: PagePool,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        levels: int,
        least: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens of every level, the target's ids, int32 [B, T, top_k], and their log-probabilities.

        rows, features float32 [M, hidden]: chains of true pairs, at least one per sequence.  place: the pairs before
        them.  levels: at most; there are fewer where the backbone is reached less often than `least`.
        Raises ValueError as a decoder does, and for logits that are no distribution.
        """
        batch = len(place.lengths)
        tokens = torch.empty(batch, levels, self._top_k, dtype=torch.int32)
        scores, count = torch.empty(tokens.shape), torch.empty(batch, dtype=torch.int32)
        _C.draft_backbone(
            *(*self._weights, *self._rest, rows.tokens, features, rows.depths, pool.k, pool.v, place.block_table),
            *(place.lengths, rows.row_start, *cos_sin, least, tokens, scores, count),
        )
        reached = int(count[0])
        return tokens[:, :reached], scores[:, :reached]
