"""The options of the drafter ouroboros."""

from __future__ import annotations

from dataclasses import dataclass

from specengine._C import MAX_NODES
from specengine.drafters.draft_model.config import check_noise
from specengine.drafters.lookahead.window import JacobiWindow
from specengine.drafters.phrases.store import MOST_KEYS, check_pool
from specengine.utils.spec_string import check_range

# The paper's table 7: the sentence's length, the window's columns, and the length of a phrase with its key.
TASKS = {
    "yi-humaneval": (12, 20, 8),
    "yi-mbpp": (6, 18, 6),
    "yi-gsm8k": (4, 15, 7),
    "yi-cnndm": (10, 15, 6),
    "yi-wmt16": (5, 16, 6),
    "deepseek-humaneval": (11, 20, 8),
    "deepseek-mbpp": (7, 15, 6),
    "codellama-humaneval": (10, 20, 7),
    "codellama-mbpp": (8, 16, 7),
    "llama-gsm8k": (6, 17, 7),
    "llama-cnndm": (4, 13, 6),
    "llama-wmt16": (4, 13, 6),
}
REFINE = ("always", "confirmed", "never")


@dataclass(frozen=True)
class Config:
    """The options.

    task: a row of the paper's table 7, which gives the next three where they are 0.
    length: tokens of the sentence (gamma).  window: columns, and phrases kept per token (W).
    ngram: tokens of a phrase with its key (beta).  suffixes: phrases appended to the sentence (K).
    inspire: keep the target's likeliest tokens behind refused tokens as phrases.
    refine: when suffixes take the target's likeliest tokens along them: `always`; `confirmed`, only after whole
    sentences, as the published code does; `never`.
    noise: the small model drafts as `match` would draw from its distribution at `noise` times the temperature; 0: the
    likeliest tokens.  warm: one pool for all requests, otherwise one for each.
    keys: tokens that a pool has phrases of, at most.  pool: a file to begin with, of Ouroboros.save_pool.
    layers: the number of its first layers to use; 0: all.  dtype: of a small model that is loaded.
    adaptive: skip cycles that do not pay, otherwise draft in every cycle.
    """

    task: str = "yi-gsm8k"
    length: int = 0
    window: int = 0
    ngram: int = 0
    suffixes: int = 3
    inspire: bool = True
    refine: str = "always"
    noise: float = 0.75
    warm: bool = True
    keys: int = 16384
    pool: str = ""
    layers: int = 0
    dtype: str = "auto"
    adaptive: bool = True

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {self.task!r}")
        if self.refine not in REFINE:
            raise ValueError(f"refine: expected one of {', '.join(REFINE)}, got {self.refine!r}")
        check_noise(self.noise)
        check_range("length", self.length, 0, MAX_NODES - 1)
        check_range("window", self.window, 0, MAX_NODES)
        check_range("ngram", self.ngram, 0, 32)
        check_range("suffixes", self.suffixes, 0, MAX_NODES)
        check_range("keys", self.keys, 1, MOST_KEYS)
        check_range("layers", self.layers, 0, 10_000)
        length, window, ngram = self.sizes
        if ngram == 1:
            raise ValueError("ngram: a phrase and its key have two tokens at least, got 1")
        check_pool(self.pool, self.warm)
        if self.nodes > MAX_NODES:
            raise ValueError(
                f"length: {length} tokens and {self.suffixes} suffixes of {ngram - 1} are {self.nodes} nodes with the "
                f"root, at most {MAX_NODES} are possible"
            )
        rows = JacobiWindow.most_nodes(window, ngram) + ngram + 1  # behind what a pass catches up with
        if rows > MAX_NODES:
            raise ValueError(
                f"window: {window} columns of {ngram}-grams are {rows} rows of a small model's pass, "
                f"at most {MAX_NODES} are possible"
            )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes length, window and ngram."""
        given = (self.length, self.window, self.ngram)
        length, window, ngram = (own or usual for own, usual in zip(given, TASKS[self.task], strict=True))
        return length, window, ngram

    @property
    def nodes(self) -> int:
        """Nodes of the largest tree, root included."""
        length, _, ngram = self.sizes
        return 1 + length + self.suffixes * (ngram - 1)
