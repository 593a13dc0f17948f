"""FastEagle's draft on the CPU: one native call from the true pairs to the children of every level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine import _C
from specengine.cache.cache_batch import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.drafters.fasteagle.checkpoint import Markov
from specengine.drafters.level_drafts import Children, DraftedLevels, chain_rows
from specengine.ops.decoder import Decoder, native_projection
from specengine.ops.weight import Projection, Weight


@dataclass(frozen=True)
class CascadeNetwork:
    """The weights of a FastEagle drafter whose layers are cascaded; csrc/ops/draft_cascade.h has their meaning.

    decoder: with every layer's output as its hidden_state_layers.  norms: of the halves that the first layer reads,
    embedding and hidden state; None: it reads one row.  markov: None: a level does not know the one above.
    """

    decoder: Decoder
    embedding: Weight
    fuse: Projection
    norms: tuple[torch.Tensor, torch.Tensor] | None
    head_norm: torch.Tensor | None
    head: Projection
    markov: Markov | None
    vocabulary: torch.Tensor | None


class CascadeDraft:
    """Drafts with one network; top_k: children per level."""

    def __init__(self, network: CascadeNetwork, top_k: int) -> None:
        embedding_norm, hidden_state_norm = network.norms or (None, None)
        markov = network.markov
        self._network = _C.CascadeNetwork(
            decoder=network.decoder.native,
            embedding=network.embedding.data,
            fuse=native_projection(network.fuse),
            embedding_norm=embedding_norm,
            hidden_state_norm=hidden_state_norm,
            head_norm=network.head_norm,
            head=native_projection(network.head),
            markov_rank=markov.rank if markov else 0,
            markov_tokens=markov.rows.data if markov else None,
            markov_head=native_projection(markov.product) if markov else _C.Projection((), (), None),
            vocabulary=network.vocabulary,
        )
        self._levels = DraftedLevels(top_k)

    def __call__(
        self,
        runs: Sequence[Sequence[int]],
        hidden_states: torch.Tensor,
        place: CacheBatch,
        pool: PagePool,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        levels: int,
    ) -> Children:
        """Returns the likeliest tokens of every request's first `levels` levels, and their log-probabilities.

        The tokens are the target's ids.  runs: tokens of the true pairs of each request, at least one.
        hidden_states: float32 [M, states, hidden] of all pairs.  place: the pairs before them.
        Raises ValueError as a decoder does, for more levels than layers, and for logits that are no distribution.
        """
        tokens, row_start = chain_rows(runs)
        cache = _C.KVCacheView(pool.k, pool.v, place.block_table, place.lengths, row_start, 0)
        children, scores = self._levels.room(len(runs), levels)
        _C.draft_cascade(self._network, tokens, hidden_states, cache, *cos_sin, children, scores)
        return children.tolist(), scores.tolist()
