"""PARD's network: a causal model that reads mask tokens in place of the tokens that it is to draft."""

from __future__ import annotations

import torch

from specengine.cache.kv_cache import CacheBatch
from specengine.cache.page_pool import PagePool
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.growth import Opened, Steps
from specengine.models.rope import RopeTables
from specengine.models.transformer import Transformer
from specengine.ops.decoder import Rows
from specengine.ops.growth.growing_trees import Logits
from specengine.ops.row_tools import add_rows, take_rows
from specengine.ops.weight import Projection


class PardNetwork:
    """Runs the layers of a model with keys and values in pages of any pool.

    Raises ValueError for a model whose embeddings are multiplied, where features are added to them.
    """

    def __init__(self, model: Transformer, features: bool) -> None:
        config = self.config = model.config
        self.model = model
        if features and config.multipliers.embedding != 1:
            raise ValueError("drafter: pard: features cannot be added to the embeddings of a model that scales them")
        self._rope = RopeTables(config, model.device)
        parts = model.weights.layers, model.final_norm
        self._decoder = model.ops.decoder(config, model.embedding, *parts, multipliers=config.multipliers)

    def ensure_positions(self, count: int) -> None:
        """Extends the rotary tables to `count` positions."""
        self._rope.ensure(count)

    @property
    def projections(self) -> list[Projection]:
        """Every linear layer of a pass."""
        return self.model.projections

    def draft(self, opened: Opened, levels: int) -> Steps:
        """Reads the text and the mask tokens after it, whose outputs are the levels."""
        hidden = self._run(opened.rows, opened.hidden_states, opened.place, opened.pool, only_cache=False)
        yield Logits(self.model.logits(take_rows(hidden, opened.last)), levels=levels)

    def cache(self, rows: TreeBatch, features: torch.Tensor | None, place: CacheBatch, pool: PagePool) -> None:
        """Caches the keys and values of M rows, and computes nothing beyond.

        features: float32 [M, hidden], added to the tokens' embeddings; None: nothing is added.
        """
        self._run(rows, features, place, pool, only_cache=True)

    def _run(
        self, rows: Rows, features: torch.Tensor | None, place: CacheBatch, pool: PagePool, *, only_cache: bool
    ) -> torch.Tensor:
        """Returns the last hidden states, float32 [M, hidden], unless only the cache is written."""
        inputs = None
        if features is not None:
            inputs = torch.empty(len(rows.tokens), self.config.hidden_size, device=self.model.device)
            self.model.ops.layer.gather_rows(self.model.embedding, rows.tokens, inputs)
            inputs = add_rows(inputs, features)
        cache = (pool.k, pool.v, place.block_table, place.lengths)
        return self._decoder(rows, *cache, *self._rope.cos_sin, inputs=inputs, only_cache=only_cache)
