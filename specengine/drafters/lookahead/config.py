"""The options of the drafter lookahead."""

from __future__ import annotations

from dataclasses import dataclass

from specengine._C import MAX_NODES
from specengine.drafters.lookahead.window import JacobiWindow
from specengine.drafters.phrases.store import MOST_KEYS, check_pool
from specengine.utils.spec_string import check_range


@dataclass(frozen=True)
class Config:
    """The options.

    window: columns, W.  ngram: length, N.  guesses: n-grams tried per cycle, G, and kept per token.
    prompt: the pool has the n-grams of prompt and answer, too.
    warm: one pool for all requests, otherwise one for each.  keys: tokens that a pool has n-grams of, at most.
    pool: a file to begin with, of Lookahead.save_pool.
    adaptive: skip cycles that do not pay, otherwise draft in every cycle.
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    prompt: bool = True
    warm: bool = False
    keys: int = 16384
    pool: str = ""
    adaptive: bool = True

    def __post_init__(self) -> None:
        check_range("window", self.window, 1, MAX_NODES)
        check_range("ngram", self.ngram, 2, 32)
        check_range("guesses", self.guesses, 1, MAX_NODES)
        check_range("keys", self.keys, 1, MOST_KEYS)
        if self.nodes > MAX_NODES:
            raise ValueError(
                f"window: {self.window} columns and {self.guesses} guesses of {self.ngram}-grams are up to "
                f"{self.nodes} nodes, at most {MAX_NODES} are possible"
            )
        check_pool(self.pool, self.warm)

    @property
    def nodes(self) -> int:
        """Nodes of the largest tree, root included."""
        return 1 + JacobiWindow.most_nodes(self.window, self.ngram) + self.guesses * (self.ngram - 1)
