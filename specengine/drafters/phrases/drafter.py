"""What drafters with a pool of phrases share: the pool, and whose it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specengine._C import PhrasePool
from specengine.drafters.phrases.file import open_pool, save_pool
from specengine.drafters.tried_drafter import TriedDrafter

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer

MOST_KEYS = 1 << 24


def check_pool(path: str, warm: bool) -> None:
    """For config dataclasses: refuses a file for pools that do not outlive a request."""
    if path and not warm:
        raise ValueError("pool: a file is for one pool of all requests; say warm=true, too")


class PhraseDrafter(TriedDrafter):
    """Its Config has warm, keys and pool.

    pool: the phrases of all requests; other drafters of the same target may be given it, too.
    """

    reads_choices = True

    def _open_pool(self, length: int, width: int, target: Transformer) -> None:
        """Pools of phrases of `length` tokens, `width` per token."""
        config = self.config
        self._target, self._shape = target, (length, width, config.keys)
        self.pool = open_pool(config.pool, self._shape, target) if config.pool else PhrasePool(*self._shape)

    def _pool_of_request(self) -> PhrasePool:
        return self.pool if self.config.warm else PhrasePool(*self._shape)

    def save_pool(self, path: str | Path) -> None:
        """Writes the pool to a file for `pool=FILE`, whole or not at all.

        Raises OSError, and ValueError where pools do not outlive their requests."""
        if not self.config.warm:
            raise ValueError("pool: with warm=false nothing is kept that could be saved")
        save_pool(path, self.pool, self._target)

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    @abstractmethod
    def _learn(self, request, committed: list[int], said: Sequence[int]) -> None:
        """observe_choices() of one request."""

    def observe_choices(
        self, requests: Sequence, committed: Sequence[list[int]], choices: Sequence[Sequence[int]]
    ) -> None:
        for request, tokens, said in zip(requests, committed, choices, strict=True):
            if request.drafter_state is not None:
                self._learn(request, tokens, said)
