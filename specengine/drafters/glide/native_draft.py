"""GLIDE's draft on the CPU: one native call from the tokens that its cache lacks to the children of the last level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine import _C
from specengine.cache.cache_batch import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.level_drafts import Children, DraftedLevels, chain_rows
from specengine.models.config import ModelConfig
from specengine.models.rope import RopeTables
from specengine.ops.decoder import Decoder, Layer, native_projection
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class GlideParts:
    """The weights of a GLIDE drafter; csrc/ops/draft_glide.h has their meaning.

    config: of its layers.  target: the target's.  cross: query and output projection of each layer; empty: it does not
    read the target's cache.  reach: keys of the target that a row may see.  vocabulary: int32 [Vd], or None.
    """

    config: ModelConfig
    target: ModelConfig
    layers: Sequence[Layer]
    cross: Sequence[tuple[Projection, Projection]]
    embedding: Weight
    final_norm: torch.Tensor
    head: Projection
    vocabulary: torch.Tensor | None
    reach: int
    block: int


class GlideDraft:
    """Drafts with one network; top_k: children per level, of which the likeliest has children of its own."""

    def __init__(self, parts: GlideParts, rope: RopeTables, target_rope: RopeTables, top_k: int) -> None:
        decoder = Decoder(parts.config, None, parts.layers, parts.final_norm)
        self._network = _C.GlideNetwork(
            decoder=decoder.native,
            embedding=parts.embedding.data,
            embedding_rows=parts.embedding.rows,
            queries=tuple(native_projection(query) for query, _ in parts.cross),
            outs=tuple(native_projection(out) for _, out in parts.cross),
            target_heads=parts.target.num_heads,
            target_head_dim=parts.target.head_dim,
            reach=parts.reach,
            block=parts.block,
            head=native_projection(parts.head),
            vocabulary=parts.vocabulary,
        )
        self._rope, self._target_rope = rope, target_rope
        self._levels = DraftedLevels(top_k)
        self._counts: dict[int, torch.Tensor] = {}  # by requests

    def __call__(
        self,
        runs: Sequence[Sequence[int]],
        place: CacheBatch,
        pool: PagePool,
        cache: PagePool,
        verified: Sequence[int],
        levels: int,
        min_gain: float = 0.0,
    ) -> Children:
        """Returns the likeliest tokens of every request's levels, the target's ids, and their log-probabilities.

        runs: of each request the tokens that the drafter's cache lacks, the root last.  place: the tokens before them.
        pool: the drafter's cache.  cache: the target's.  verified: tokens in it, of each request.
        levels: at most.  min_gain: drafting stops before a level that is expected to add fewer, the sum over the
        requests. Raises ValueError for tokens without a page or a position, and for no distribution.
        """
        tokens, row_start = chain_rows(runs)
        children, scores = self._levels.room(len(runs), levels)
        count = self._counts.setdefault(len(runs), torch.zeros(len(runs), dtype=torch.int32))
        own = _C.KVCacheView(pool.k, pool.v, place.block_table, place.lengths, row_start, 0)
        lengths = torch.tensor(verified, dtype=torch.int32)
        target = _C.KVCacheView(cache.k, cache.v, place.block_table, lengths, row_start, 0)
        tables = (*self._rope.cos_sin, *self._target_rope.cos_sin)
        _C.draft_glide(self._network, tokens, own, target, *tables, min_gain, children, scores, count)
        reached = int(count[0])
        return [b[:reached] for b in children.tolist()], [b[:reached] for b in scores.tolist()]
