"""A model beside the target, with a cache of its own: draft_model and ouroboros draft with one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from specengine.cache.cache_batch import CacheBatch
from specengine.cache.kv_cache import KVCache
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.one_engine import OneEngine
from specengine.drafters.shipped import shipped_folder
from specengine.hub.huggingface import resolve_model
from specengine.models.checkpoint import open_checkpoint
from specengine.models.checkpoint_base import BLOCK_TYPES
from specengine.models.draft_checkpoint import open_draft_checkpoint
from specengine.models.transformer import Transformer
from specengine.tensor_parallel.loading import load_model
from specengine.tokenizer import Tokenizer
from specengine.utils.json_file import read_json_object

SELF = "self"  # the path that stands for the target
SHIPPED = "draft_model"  # the folder of the checkpoint that comes with the package


@dataclass
class State:
    """What the cache holds of a request: `cached` committed tokens, then the drafted tokens `ahead`."""

    pages: list[int]
    cached: int = 0
    ahead: list[int] = field(default_factory=list)

    def settle(self, tokens: Sequence[int]) -> None:
        """Counts the drafted tokens that were committed; the last token stays uncounted, as its logits are needed."""
        self.cached = min(self.cached, len(tokens) - 1)
        for token in self.ahead:
            if self.cached == len(tokens) - 1 or tokens[self.cached] != token:
                break
            self.cached += 1
        self.ahead = []


class SmallModel:
    """Loads the model of a drafter, and keeps its cache.

    drafter: its name, for errors.  path: of a model with the target's vocabulary, or `self`: the target.
    layers: the number of the model's first layers to use; 0: all.  dtype: of a model that is loaded.
    hybrids: whether the drafter can use a hybrid, whose states it must advance by `replay`.
    Raises ValueError for a model that does not fit the target.
    """

    def __init__(
        self, drafter: str, layers: int, dtype: str, path: str | None, target: Transformer, hybrids: bool = False
    ) -> None:
        self.model, self.tokenizer = _open(drafter, layers, dtype, path, target)
        self.hybrid = self.model.config.gated_delta is not None
        if self.hybrid and not hybrids:
            raise ValueError(
                f"drafter: {path} is a hybrid model, whose states {drafter} cannot take back; expected attention alone"
            )
        ours, theirs = self.model.config.vocab_size, target.config.vocab_size
        if ours != theirs:
            raise ValueError(f"drafter: {path} has a vocabulary of {ours} tokens, the target has {theirs}")
        self._path = path
        self._engine = OneEngine(drafter)

    def check_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Raises ValueError where the model's tokens are not the target's."""
        if tokenizer is None or self.tokenizer is None:
            return
        token = tokenizer.first_difference(self.tokenizer, self.model.config.vocab_size)
        if token is not None:
            ours, theirs = self.tokenizer.token_text(token), tokenizer.token_text(token)
            raise ValueError(f"drafter: token {token} is {ours!r} in {self._path} and {theirs!r} in the target")

    @cached_property
    def cache(self) -> KVCache:
        """The model's keys and values."""
        return self.model.new_cache()

    def attach(self, cache: KVCache) -> None:
        """Makes its cache as large as a fixed one of the target. Raises ValueError for a second engine."""
        self._engine.claim()
        if cache.fixed:
            self.model.tune()
            self.cache = self.model.new_cache(cache.k.shape[1])
        cache.rests_with(self.cache)
        self.cache.kept_bytes = cache.kept_bytes

    def begin(self, request: DraftRequest, beyond: int) -> tuple[list[int], int]:
        """Returns pages for the whole request, and how many of its tokens are cached there.

        beyond: rows of a pass behind the request's longest text.
        """
        longest = request.prompt_length + request.limit + beyond
        self.model.ensure_positions(min(longest, self.model.config.max_position))
        return self.cache.allocate_with_prefix(longest, request.tokens[:-1], request.sharing)

    def release(self, request: DraftRequest) -> None:
        """Frees a request's pages."""
        if state := request.drafter_states.pop(self, None):
            self.cache.free(state.pages, request.shareable_tokens(state.cached), request.sharing)

    def replay(self, rows: TreeBatch, place: CacheBatch, lengths: Sequence[int]) -> None:
        """Writes a hybrid's states behind the first rows of each request in the last pass, as many as `lengths`."""
        assert self.cache.states is not None and place.states is not None
        if not any(lengths):
            return
        device = self.model.device
        path = torch.arange(max(lengths), dtype=torch.int32, device=device).repeat(len(lengths), 1)
        counts = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.cache.states.replay(place.states, rows.row_start, path, counts, self.model.ops)

    def depth(self, request: DraftRequest) -> int:
        """Returns the levels worth drafting, as far as the model's own context goes."""
        return min(request.draft_limit, self.model.config.max_position - len(request.tokens) + 1)

    def catch_up(self, requests: Sequence[DraftRequest], states: Sequence[State], most: int) -> None:
        """Passes tokens of each request until at most `most` are left: a prompt is more than one pass should hold."""
        step = self.model.ops.prefill_rows
        for request, state in zip(requests, states, strict=True):
            tokens = request.tokens
            state.settle(tokens)
            while (waiting := len(tokens) - state.cached) > most:
                run = tokens[state.cached : state.cached + min(step, waiting - most)]
                rows = TreeBatch.chains([run], self.model.device)
                self.model.hidden(rows, self.cache, self.cache.batch([state.pages], [state.cached]))
                state.cached += len(run)


def _open(
    name: str, layers: int, dtype: str, path: str | None, target: Transformer
) -> tuple[Transformer, Tokenizer | None]:
    """Returns the model that drafts, and its tokenizer where that is not the target's own."""
    if path is None and (found := shipped_folder(SHIPPED, target)) is not None:
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
    """Loads the model beside the target; `auto` keeps the formats of a quantised file."""
    if _shares(path):
        return target.with_layers(open_draft_checkpoint(path), dtype), None
    stored = open_checkpoint(resolve_model(path)).tensors.values()
    if not any(tensor.coding or tensor.dtype in BLOCK_TYPES for tensor in stored):
        dtype = target.draft_dtype(dtype)
    loaded = load_model(path, device=target.device.type, dtype=dtype, ops=target.ops)
    return loaded.target, loaded.tokenizer


def _shares(path: str) -> bool:
    """Returns whether it is a folder of layers alone, which stand between the target's embedding and head."""
    config = Path(path) / "config.json"
    return config.is_file() and bool(read_json_object(config).get("shared_with_target"))
