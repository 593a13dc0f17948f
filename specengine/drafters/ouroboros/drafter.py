"""Ouroboros (Zhao et al. 2024): a small model drafts by phrases, and what the target refuses still teaches it.

A sentence of `length` tokens comes from the small model, which decodes with lookahead over a pool of phrases. The
newest phrases behind its last token are appended as suffixes, and one target pass verifies all of it. What the target
says behind tokens it refused becomes new phrases (inspiration), what it says along the suffixes takes their place
(refinement). The pool lives as long as the drafter and serves all requests (warm start).

Phrases are deterministic proposals, so they serve every temperature; above 0 a sentence is what the rule `match` would
draw from the small model. Beyond the published code: that, batches, suffixes that share a path, and one bonus token
behind a suffix that was right to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from specengine._C import MAX_NODES
from specengine.draft_policy.cost_model import CostModel
from specengine.draft_trees.merge import MergedPaths
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.draft_model.small_model import SmallModelDrafter, check_noise
from specengine.drafters.lookahead.window import JacobiWindow
from specengine.drafters.ouroboros.sentences import Mind, Speaker
from specengine.drafters.phrases.drafter import MOST_KEYS, PhraseDrafter, check_pool
from specengine.models.transformer import Transformer
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
    """task: whose settings in the paper's table 7 are taken for the next three where they are 0.
    length: tokens of the sentence (gamma).  window: columns, and phrases kept per token (W).  ngram: a phrase with its
    key (beta).  suffixes: phrases appended to the sentence (K).
    inspire: keep what the target says behind refused tokens.  refine: suffixes by what the target says along them:
    `always`; `confirmed`: after whole sentences alone, as the published code does; `never`.
    noise: the small model says what `match` would draw of its distribution at so much of the temperature; 0: the
    likeliest tokens.  warm: one pool for all requests, else one for each.
    keys: tokens that a pool has phrases of, at most.  pool: a file to begin with, see PhraseDrafter.save_pool.
    layers: the small model's first so many, 0: all.  dtype: of a small model that is loaded.
    adaptive: leave out what does not pay, else draft in every cycle.
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
        """length, window and ngram."""
        given = (self.length, self.window, self.ngram)
        length, window, ngram = (own or usual for own, usual in zip(given, TASKS[self.task], strict=True))
        return length, window, ngram

    @property
    def nodes(self) -> int:
        """Of the largest tree, root included."""
        length, _, ngram = self.sizes
        return 1 + length + self.suffixes * (ngram - 1)


class Ouroboros(SmallModelDrafter, PhraseDrafter):
    """Drafts sentences of a small model and phrases behind them.

    costs: what the target's rows cost; by default measured.
    """

    name = "ouroboros"
    config_type = Config
    config: Config

    def __init__(self, config: Config, path: str | None, target: Transformer, costs: CostModel | None = None) -> None:
        super().__init__(config, path, target)
        self._length, self._window, self._ngram = config.sizes
        self._open_pool(self._ngram - 1, self._window, target)
        self._try(target, costs)
        rows = JacobiWindow.most_nodes(self._window, self._ngram)
        self._speaker = Speaker(self.model, rows, self._window, config.noise)

    @property
    def spare_slots(self) -> int:
        return MAX_NODES + self._length  # the small model's passes lie behind the sentence so far

    def draft_with_logits(self, requests: Sequence, sampled: bool) -> tuple[list[DraftTree], None]:
        # These rules draw their residual with the noise of `match`: drafts that shared it would bias the output.
        return self._tried(requests, partial(self._trees, noise=False)), None

    def _trees(self, requests: Sequence, paused: bool, noise: bool = True) -> list[DraftTree]:
        """noise: whether sentences are drawn as `match` would, else they are the small model's likeliest tokens."""
        minds = [self._mind(request) for request in requests]
        for mind in minds:
            mind.sentence, mind.suffixes = [], []
        if not paused:
            self._say(requests, minds, noise)
        return [self._tree(request, mind) for request, mind in zip(requests, minds, strict=True)]

    def _learn(self, request, committed: list[int], said: Sequence[int]) -> None:
        mind = request.drafter_state
        sentence = mind.sentence
        if not sentence or len(said) <= len(sentence):  # a device's graph may have cut the tree
            return
        pairs = enumerate(zip(sentence, committed, strict=False))
        right = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(sentence), len(committed)))
        if self.config.inspire and right < len(sentence):
            self._inspire(mind, right, said)
        if self.config.refine == "always" or (self.config.refine == "confirmed" and right == len(sentence)):
            self._refine(mind, said)

    def _mind(self, request) -> Mind:
        if request.drafter_state is None:
            window = JacobiWindow(self._window, self._ngram, request.tokens)
            place = self._place(request, self.spare_slots)
            request.drafter_state = Mind(*place, window=window, pool=self._pool_of_request())
        return request.drafter_state

    def _say(self, requests: Sequence, minds: list[Mind], noise: bool) -> None:
        """Gives every request the small model's sentence, as many tokens as are worth drafting."""
        goals = [min(self._length, self._depth(request)) for request in requests]
        able = [each for each in zip(requests, minds, goals, strict=True) if each[2] > 0]
        if able:
            speaking, own, wanted = zip(*able, strict=True)
            self._catch_up(speaking, own, self._ngram + 1)  # a suffix and what follows it, and the root
            self._speaker.say(self._cache, speaking, own, wanted, noise)

    def _tree(self, request, mind: Mind) -> DraftTree:
        """The sentence and the suffixes behind it."""
        tree, sentence = MergedPaths(request.tokens[-1]), mind.sentence
        last = tree.add_path(0, sentence)[-1] if sentence else 0
        left = request.draft_limit - len(sentence)
        for phrase in mind.pool.newest(sentence[-1], self.config.suffixes) if sentence else ():
            mind.suffixes.append((phrase, tree.add_path(last, phrase[:left])))
        return tree.tree

    def _inspire(self, mind: Mind, right: int, said: Sequence[int]) -> None:
        """Phrases from the part of a sentence that was refused: what the target says behind a token, and behind the
        token after it where that is what it said, and so on. `right` tokens were accepted."""
        sentence, length = mind.sentence, self._ngram - 1
        following = said[1 : len(sentence) + 1]  # by the target, behind each token of the sentence
        for start in range(right, len(sentence) - length + 1):
            phrase = [*following[start : start + length]]
            if sentence[start + 1 : start + length] == phrase[:-1]:
                mind.pool.insert(sentence[start], phrase)

    def _refine(self, mind: Mind, said: Sequence[int]) -> None:
        """Suffixes become what the target says along them."""
        for phrase, nodes in mind.suffixes:
            if len(nodes) == len(phrase) and max(nodes) < len(said):
                along = [said[node] for node in (len(mind.sentence), *nodes[:-1])]
                mind.pool.replace(mind.sentence[-1], phrase, along)
