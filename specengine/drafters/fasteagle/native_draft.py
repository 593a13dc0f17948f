"""FastEagle's draft on the CPU: one native call from the true pairs to the children of every level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specengine import _C
from specengine.cache.page_pool import PagePool
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.drafters.fasteagle.checkpoint import Markov
from specengine.drafters.hidden_states.pairs import UnreadPairs
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
            markov_head=native_projection(markov.product) if markov else _C.Projection((), (), None, None, False),
            vocabulary=network.vocabulary,
        )
        self._top_k = top_k

    def __call__(
        self,
        unread: UnreadPairs,
        pages: Sequence[Sequence[int]],
        pool: PagePool,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        limits: Sequence[int],
        levels: int,
    ) -> list[ScoredTree]:
        """Returns each request's backbone with leaves, in the target's tokens.

        unread: at least one pair of each request.  pages: of each request.  limits: levels of each tree.
        levels: that are read by the head, at most one per layer.
        Raises ValueError as a decoder does, for more levels than layers, and for logits that are no distribution.
        """
        place = (pages, unread.cached, pool.k, pool.v, *cos_sin)
        trees = self._network.draft(
            unread.tokens, unread.hidden_states, unread.rows, *place, limits, levels, self._top_k
        )
        return [ScoredTree(*tree) for tree in trees]
