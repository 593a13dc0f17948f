"""Pools of phrases, and which requests they serve: lookahead and ouroboros draft from them."""

from __future__ import annotations

from pathlib import Path

from specengine._C import PhrasePool
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.phrases.file import open_pool, save_pool
from specengine.models.lora.adapters import Adapter
from specengine.models.transformer import Transformer

MOST_KEYS = 1 << 24


def check_pool(path: str, warm: bool) -> None:
    """Raises ValueError for a file of pools that end with their requests."""
    if path and not warm:
        raise ValueError("pool: a file is for one pool of all requests; say warm=true, too")


class PhraseStore:
    """Holds the phrases of `length` tokens that a drafter knows, `width` per token.

    warm: one pool serves all requests of one adapter; otherwise each request has one.  keys: tokens with phrases, at
    most.  file: to begin with; empty: none.
    pool: of all requests without adapter. Other drafters of the same target may be given it, too.
    """

    def __init__(self, length: int, width: int, target: Transformer, *, warm: bool, keys: int, file: str = "") -> None:
        self._target = target
        self._warm = warm
        self._shape = (length, width, keys)
        self._of_adapter: dict[Adapter, PhrasePool] = {}  # an adapter's phrases are another model's
        self.pool = open_pool(file, self._shape, target) if file else PhrasePool(*self._shape)

    def pool_for(self, request: DraftRequest) -> PhrasePool:
        """Returns the pool that a new request uses."""
        if not self._warm:
            return PhrasePool(*self._shape)
        if request.adapter is None:
            return self.pool
        return self._of_adapter.setdefault(request.adapter, PhrasePool(*self._shape))

    def save(self, path: str | Path) -> None:
        """Writes the pool of requests without adapter to a file, whole or not at all.

        Raises OSError, and ValueError where pools end with their requests.
        """
        if not self._warm:
            raise ValueError("pool: with warm=false nothing is kept that could be saved")
        save_pool(path, self.pool, self._target)
