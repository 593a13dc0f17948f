"""How Ouroboros' small model drafts: lookahead decoding over a pool of phrases, until a sentence is long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch

from specengine._C import PhrasePool
from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.draft_trees.merge import MergedPaths
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.draft_model.small_model import State
from specengine.drafters.engine_views import DraftRequest
from specengine.drafters.lookahead.window import JacobiWindow
from specengine.models.transformer import Transformer
from specengine.ops.draw_siblings import draw_siblings
from specengine.ops.row_tools import take_rows
from specengine.ops.sampling_table import SamplingTable, TokenHistory


@dataclass
class RequestState(State):
    """What the drafter remembers of a request.

    sentence: of the last draft; empty where there was none.
    suffixes: phrases behind the sentence, with their nodes in the target's tree.
    """

    window: JacobiWindow = field(kw_only=True)
    pool: PhrasePool = field(kw_only=True)
    sentence: list[int] = field(default_factory=list)
    suffixes: list[tuple[list[int], list[int]]] = field(default_factory=list)


@dataclass
class Rows:
    """A request's rows of one pass: a chain of tokens that are not cached yet, then phrases and window.

    root: the chain's last node, below which phrases and window lie.  verified: root and nodes of phrases.
    column: see JacobiWindow.add_to; empty: no window.
    """

    paths: MergedPaths
    root: int
    verified: list[int]
    column: list[int]

    @property
    def asked(self) -> list[int]:
        """The nodes whose next tokens are needed."""
        return [*dict.fromkeys((*self.verified, *self.column))]


class SentenceDrafter:
    """Drafts sentences with the small model.

    window: most rows of a window.  phrases: most tried at a time.  noise: see Ouroboros' Config.
    """

    def __init__(self, model: Transformer, window: int, phrases: int, noise: float) -> None:
        self._model, self._window, self._phrases, self._noise = model, window, phrases, noise

    def draft(
        self,
        cache: KVCache,
        requests: Sequence[DraftRequest],
        states: Sequence[RequestState],
        goals: Sequence[int],
        noise: bool,
    ) -> None:
        """Extends every state's sentence to its goal. SmallModel.catch_up() has cached the text before.

        noise: draw tokens as the rule `match` would; otherwise they are the likeliest at any temperature.
        """
        left = [each for each in zip(requests, states, goals, strict=True) if each[2] > 0]
        while left:
            self._extend(cache, [request for request, _, _ in left], [state for _, state, _ in left], noise)
            for _, state, goal in left:
                del state.sentence[goal:]
            left = [each for each in left if len(each[1].sentence) < each[2]]

    def _extend(self, cache: KVCache, requests: list[DraftRequest], states: list[RequestState], noise: bool) -> None:
        """Runs one pass; extends every sentence by the verified tokens of a phrase and one more token."""
        texts = [request.tokens + state.sentence for request, state in zip(requests, states, strict=True)]
        batch = [self._rows(text, state) for text, state in zip(texts, states, strict=True)]
        place = cache.batch([state.pages for state in states], [state.cached + len(state.ahead) for state in states])
        masked = self._model.ops.on_device
        tree = TreeBatch.of([rows.paths.tree for rows in batch], self._model.device, masked=masked)
        hidden_states = self._model.hidden(tree, cache, place)
        starts = [0, *accumulate(len(rows.paths.tokens) for rows in batch)]
        likeliest = self._likeliest(hidden_states, batch, starts)
        drawn = self._drawn(hidden_states, batch, starts, tree, requests, texts) if noise else None
        kept: list[list[int]] = []
        for request, text, state, rows, likely, drafted in zip(
            requests, texts, states, batch, likeliest, drawn or likeliest, strict=True
        ):
            if rows.column:
                for token, phrase in state.window.advance(text[-1], [likely[node] for node in rows.column]):
                    state.pool.insert(token, phrase)
            node: int | None = rows.root
            path = [*range(rows.root)]
            while node is not None and node in rows.verified:
                path.append(node)
                state.sentence.append(drafted[node])
                node = rows.paths.child(node, drafted[node])
            kept.append(path)
            state.cached = len(request.tokens)
            state.ahead = state.sentence[:-1]
        self._compact(cache, place, kept)

    def _rows(self, text: list[int], state: RequestState) -> Rows:
        run = text[state.cached + len(state.ahead) :]
        paths = MergedPaths(run[0])
        root = [0, *paths.add_path(0, run[1:])][-1]
        room = self._model.config.max_position - len(text)  # positions behind the root
        windowed = state.window.depth <= room
        phrases = [phrase[:room] for phrase in state.pool.newest(text[-1], self._phrases)]
        nodes = paths.add_phrases(root, phrases, reserve=self._window if windowed else 0)
        verified = [root, *dict.fromkeys(node for path in nodes for node in path)]
        return Rows(paths, root, verified, state.window.add_to(paths, root) if windowed else [])

    def _likeliest(self, hidden_states: torch.Tensor, batch: list[Rows], starts: list[int]) -> list[dict[int, int]]:
        """Returns the likeliest token behind every asked node, per request."""
        model = self._model
        picked = [start + node for start, rows in zip(starts, batch, strict=False) for node in rows.asked]
        tokens = iter(model.ops.linear_argmax(take_rows(hidden_states, picked), model.head).tolist())
        return [{node: next(tokens) for node in rows.asked} for rows in batch]

    def _drawn(
        self, hidden_states, batch: list[Rows], starts, tree: TreeBatch, requests, texts
    ) -> list[dict[int, int]] | None:
        """Returns the tokens that the rule `match` would draw behind the nodes to verify; None: the likeliest anyway.

        They are drawn as if the small model were the target.
        """
        if not self._noise or not any(request.params.temperature for request in requests):
            return None
        model, device = self._model, self._model.device
        nodes = [(b, node) for b, rows in enumerate(batch) for node in rows.verified]
        logits = model.logits(take_rows(hidden_states, [starts[b] + node for b, node in nodes]))
        slots, own = (torch.tensor(column, dtype=torch.int32, device=device) for column in zip(*nodes, strict=True))
        roots = [text[: len(text) - rows.root] for text, rows in zip(texts, batch, strict=True)]  # up to the first node
        params = SamplingTable.of([s.params for s in requests], [s.seed for s in requests]).to(device)
        params = replace(params, temperature=self._noise * params.temperature)
        prompts = [min(s.prompt_length, len(root)) for s, root in zip(requests, roots, strict=True)]
        history = TokenHistory.of(roots, prompts, max(map(len, roots))).to(device)
        drawn = draw_siblings(logits, own, tree, slots, params, history, 1, False, as_match=True)
        tokens = iter(drawn.flatten().tolist())
        return [{node: next(tokens) for node in rows.verified} for rows in batch]

    def _compact(self, cache: KVCache, place: CacheBatch, paths: list[list[int]]) -> None:
        """Moves the keys and values of the paths behind the cached ones, in order."""
        width = max(map(len, paths))
        table = np.array([path + [-1] * (width - len(path)) for path in paths], dtype=np.int32)
        counts = np.array([len(path) for path in paths], dtype=np.int32)
        path, count = (torch.from_numpy(each).to(cache.device) for each in (table, counts))
        self._model.ops.compact_kv(cache.k, cache.v, place.block_table, place.lengths, path, count)
