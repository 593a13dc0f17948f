"""What drafters by another model share: the model beside the target, and a cache of its own for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specengine.cache.kv_cache import KVCache
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.base import Drafter
from specengine.drafters.shipped import shipped
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.models.transformer import Transformer
from specengine.tensor_parallel.loading import load_model
from specengine.tokenizer import Tokenizer
from specengine.utils.json_file import read_json_object

SELF = "self"  # the path that stands for the target
SHIPPED = "draft_model"  # what the checkpoint that comes with the package is called


def check_noise(noise: float) -> None:
    """For config dataclasses: refuses a share of the temperature that is none."""
    if noise != 0 and not 0.01 <= noise <= 1:
        raise ValueError(f"noise: expected 0 or a number from 0.01 to 1, got {noise!r}")


@dataclass
class State:
    """What the cache holds of a request: `cached` committed tokens, then the drafted tokens `ahead`."""

    pages: list[int]
    cached: int = 0
    ahead: list[int] = field(default_factory=list)

    def settle(self, tokens: Sequence[int]) -> None:
        """Counts what was drafted and has been committed; never the last token, whose logits are wanted (again)."""
        self.cached = min(self.cached, len(tokens) - 1)
        for token in self.ahead:
            if self.cached == len(tokens) - 1 or tokens[self.cached] != token:
                break
            self.cached += 1
        self.ahead = []


class SmallModelDrafter(Drafter):
    """A drafter by a model with the target's vocabulary, or by the target's own first layers.

    model: the one that drafts.  layers: its first so many, 0: all.  dtype: of a model that is loaded.
    """

    takes_path = True

    def __init__(self, config: Any, path: str | None, target: Transformer) -> None:
        super().__init__(config, path, target)
        self.model, self._tokenizer = _open(self.name, config.layers, config.dtype, path, target)
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise ValueError(f"drafter: {path} has a vocabulary of {ours} tokens, the target has {theirs}")
        self._path, self._cache = path, self.model.new_cache()

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None or self._tokenizer is None:
            return
        token = tokenizer.first_difference(self._tokenizer)
        if token is not None:
            ours, theirs = self._tokenizer.token_text(token), tokenizer.token_text(token)
            raise ValueError(f"drafter: token {token} is {ours!r} in {self._path} and {theirs!r} in the target")

    @property
    def page_bytes(self) -> int:
        return self._cache.page_bytes

    def attach(self, cache: KVCache) -> None:
        if cache.fixed:
            self._attach_once()
            self.model.tune()
            self._cache = self.model.new_cache(cache.k.shape[1])
        self._cache.kept_bytes = cache.kept_bytes

    def release(self, request) -> None:
        state, request.drafter_state = request.drafter_state, None
        if state is not None:
            self._cache.free(state.pages, request.shareable_tokens(state.cached), request.sharing)

    def _place(self, request, beyond: int) -> tuple[list[int], int]:
        """Pages for all that a request may become and a pass of so many rows behind it; its tokens cached there."""
        longest = request.prompt_length + request.limit + beyond
        self.model.ensure_positions(min(longest, self.model.config.max_position))
        return self._cache.begin(longest, request.tokens[:-1], request.sharing)

    def _depth(self, request) -> int:
        """Levels worth drafting, as far as the draft model's own context goes."""
        return min(request.draft_limit, self.model.config.max_position - len(request.tokens) + 1)

    def _reads_prompt(self, request) -> bool:
        return request.drafter_state is None or request.drafter_state.cached < request.prompt_length

    def _catch_up(self, requests: Sequence, states: Sequence[State], most: int) -> None:
        """Passes what is more than `most` tokens of a request: prompts."""
        step = self.model.ops.prefill_rows
        for request, state in zip(requests, states, strict=True):
            tokens = request.tokens
            state.settle(tokens)
            while (waiting := len(tokens) - state.cached) > most:
                run = tokens[state.cached : state.cached + min(step, waiting - most)]
                rows = TreeBatch.chains([run], self.model.device)
                self.model.hidden(rows, self._cache, self._cache.batch([state.pages], [state.cached]))
                state.cached += len(run)


def _open(
    name: str, layers: int, dtype: str, path: str | None, target: Transformer
) -> tuple[Transformer, Tokenizer | None]:
    """The model that drafts, and its tokenizer where that is not the target's own."""
    if path is None and (found := shipped(SHIPPED, target)) is not None:
        path = str(found)
    if path is None:
        name = name.replace("_", "-")
        raise ValueError(
            f"drafter: {name}:MODEL takes a model with the target's vocabulary, "
            f"{name}:self,layers=N the target's own first layers"
        )
    if path != SELF:
        model, tokenizer = _load(path, dtype, target)
        return model.first_layers(layers) if layers else model, tokenizer
    if dtype != "auto":
        raise ValueError(f"drafter: dtype: the target's layers are what they are, got {dtype!r}")
    return target.first_layers(layers), None  # refuses 0: the whole target would draft nothing faster


def _load(path: str, dtype: str, target: Transformer) -> tuple[Transformer, Tokenizer | None]:
    """The model beside the target."""
    if _shares(path):
        return target.with_layers(open_draft_checkpoint(path), dtype), None
    loaded = load_model(path, device=target.device.type, dtype=dtype, ops=target.ops)
    return loaded.target, loaded.tokenizer


def _shares(path: str) -> bool:
    """Whether it is a folder of layers alone, to stand between the target's embedding and head."""
    config = Path(path) / "config.json"
    return config.is_file() and bool(read_json_object(config).get("shared_with_target"))
