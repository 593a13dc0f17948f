"""What drafters with a pool of phrases share: the pool, whose it is, and when drafting is left out."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specengine._C import PhrasePool
from specengine.drafters.base import Drafter
from specengine.drafting.cost_model import CostModel, costs_of
from specengine.drafting.pauses import Trial
from specengine.drafting.phrase_file import open_pool, save_pool
from specengine.tree import DraftTree

if TYPE_CHECKING:
    from specengine.models.transformer import Transformer

MOST_KEYS = 1 << 24


def check_pool(path: str, warm: bool) -> None:
    """For config dataclasses: refuses a file for pools that do not outlive a request."""
    if path and not warm:
        raise ValueError("pool: a file is for one pool of all requests, warm=true")


class PhraseDrafter(Drafter):
    """Its Config has warm, keys, pool and adaptive.

    pool: the phrases of all requests; other drafters of the same target may be given it, too.
    """

    reads_choices = True

    def _open_pool(self, length: int, width: int, target: Transformer, costs: CostModel | None) -> None:
        """Pools of phrases of `length` tokens, `width` per token.  costs: of the target's passes; None: measured."""
        config = self.config
        measured = config.adaptive and not target.ops.resident
        self._trial = Trial(costs or costs_of(target)) if measured else None
        self._target, self._shape = target, (length, width, config.keys)
        self.pool = open_pool(config.pool, self._shape, target) if config.pool else PhrasePool(*self._shape)

    def _pool_of_request(self) -> PhrasePool:
        return self.pool if self.config.warm else PhrasePool(*self._shape)

    def save_pool(self, path: str | Path) -> None:
        """Writes the pool to a file for `pool=FILE`, whole or not at all. Raises OSError."""
        save_pool(path, self.pool, self._target)

    @property
    def adaptive(self) -> bool:
        return self.config.adaptive

    @property
    def max_nodes(self) -> int:
        return self.config.nodes

    @abstractmethod
    def _trees(self, sequences: Sequence, paused: bool) -> list[DraftTree]:
        """As draft(); paused: the roots alone."""

    @abstractmethod
    def _learn(self, sequence, committed: list[int], said: Sequence[int]) -> None:
        """observe_choices() of one sequence."""

    def draft(self, sequences: Sequence) -> list[DraftTree]:
        if self._trial is None or not sequences:
            return self._trees(sequences, False)
        began, paused = time.perf_counter(), self._trial.here()
        trees = self._trees(sequences, paused)
        if not paused:
            prefix = sum(len(sequence.tokens) for sequence in sequences) / len(sequences)
            nodes = sum(len(tree.tokens) for tree in trees) - len(trees)
            self._trial.drafted(len(sequences), nodes, prefix, time.perf_counter() - began)
        return trees

    def observe_choices(
        self, sequences: Sequence, committed: Sequence[list[int]], choices: Sequence[Sequence[int]]
    ) -> None:
        for sequence, tokens, said in zip(sequences, committed, choices, strict=True):
            if sequence.drafter_state is not None:
                self._learn(sequence, tokens, said)
        if self._trial is not None:
            self._trial.committed(sum(map(len, committed)))
