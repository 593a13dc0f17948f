"""How Ouroboros' small model drafts: lookahead decoding over a pool of phrases, until a sentence is long enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from specengine._C import PhrasePool
from specengine.cache.kv_cache import CacheBatch, KVCache
from specengine.draft_trees.merge import MergedPaths
from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.draft_model.small_model import State
from specengine.drafters.lookahead.window import JacobiWindow
from specengine.models.transformer import Transformer
from specengine.ops.draw_siblings import draw_siblings
from specengine.ops.row_tools import take_rows
from specengine.ops.sampling_table import SamplingTable, TokenHistory

if TYPE_CHECKING:
    from specengine.engine.request import Request


@dataclass
class Mind(State):
    """What the drafter remembers of a request. sentence: of the last draft; empty where there was none.
    suffixes: behind it, as phrases with their nodes in the target's tree."""

    window: JacobiWindow = field(kw_only=True)
    pool: PhrasePool = field(kw_only=True)
    sentence: list[int] = field(default_factory=list)
    suffixes: list[tuple[list[int], list[int]]] = field(default_factory=list)


@dataclass
class Rows:
    """A request's rows of one pass: a chain of what is not cached yet, whose last node is the root of phrases and
    window.  verified: root and nodes of phrases.  column: see JacobiWindow.add_to; empty: no window."""

    paths: MergedPaths
    root: int
    verified: list[int]
    column: list[int]

    @property
    def asked(self) -> list[int]:
        """The nodes whose next tokens are wanted."""
        return [*dict.fromkeys((*self.verified, *self.column))]


class Speaker:
    """The small model. window: most rows of a window; phrases: most tried at a time; noise: see Ouroboros' Config."""

    def __init__(self, model: Transformer, window: int, phrases: int, noise: float) -> None:
        self._model, self._window, self._phrases, self._noise = model, window, phrases, noise

    def say(
        self,
        cache: KVCache,
        requests: Sequence[Request],
        minds: Sequence[Mind],
        goals: Sequence[int],
        noise: bool,
    ) -> None:
        """Makes every mind's sentence as long as its goal; what lies in the cache before it is caught up with.

        noise: whether tokens are what the rule `match` would draw, else the likeliest at any temperature.
        """
        left = [each for each in zip(requests, minds, goals, strict=True) if each[2] > 0]
        while left:
            self._go_on(cache, [request for request, _, _ in left], [mind for _, mind, _ in left], noise)
            for _, mind, goal in left:
                del mind.sentence[goal:]
            left = [each for each in left if len(each[1].sentence) < each[2]]

    def _go_on(self, cache: KVCache, requests: list[Request], minds: list[Mind], noise: bool) -> None:
        """One pass: every sentence becomes longer by what is verified of a phrase and one token more."""
        texts = [request.tokens + mind.sentence for request, mind in zip(requests, minds, strict=True)]
        batch = [self._rows(text, mind) for text, mind in zip(texts, minds, strict=True)]
        place = cache.batch([mind.pages for mind in minds], [mind.cached + len(mind.ahead) for mind in minds])
        tree = TreeBatch.of([rows.paths.tree for rows in batch], self._model.device)
        hidden_states = self._model.hidden(tree, cache, place)
        starts = [0, *accumulate(len(rows.paths.tokens) for rows in batch)]
        likeliest = self._likeliest(hidden_states, batch, starts)
        drawn = self._drawn(hidden_states, batch, starts, tree, requests, texts) if noise else None
        kept = []
        for request, text, mind, rows, likely, said in zip(
            requests, texts, minds, batch, likeliest, drawn or likeliest, strict=True
        ):
            if rows.column:
                for token, phrase in mind.window.advance(text[-1], [likely[node] for node in rows.column]):
                    mind.pool.insert(token, phrase)
            node, path = rows.root, [*range(rows.root)]
            while node in rows.verified:
                path.append(node)
                mind.sentence.append(said[node])
                node = rows.paths.child(node, said[node])
            kept.append(path)
            mind.cached, mind.ahead = len(request.tokens), mind.sentence[:-1]
        self._compact(cache, place, kept)

    def _rows(self, text: list[int], mind: Mind) -> Rows:
        run = text[mind.cached + len(mind.ahead) :]
        paths = MergedPaths(run[0])
        root = [0, *paths.add_path(0, run[1:])][-1]
        room = self._model.config.max_position - len(text)  # positions behind the root
        windowed = mind.window.depth <= room
        phrases = [phrase[:room] for phrase in mind.pool.newest(text[-1], self._phrases)]
        nodes = paths.add_phrases(root, phrases, reserve=self._window if windowed else 0)
        verified = [root, *dict.fromkeys(node for path in nodes for node in path)]
        return Rows(paths, root, verified, mind.window.add_to(paths, root) if windowed else [])

    def _likeliest(self, hidden_states: torch.Tensor, batch: list[Rows], starts: list[int]) -> list[dict[int, int]]:
        """The likeliest token behind every node that is asked, per request."""
        model = self._model
        picked = [start + node for start, rows in zip(starts, batch, strict=False) for node in rows.asked]
        tokens = iter(model.ops.linear_argmax(take_rows(hidden_states, picked), model.head).tolist())
        return [{node: next(tokens) for node in rows.asked} for rows in batch]

    def _drawn(
        self, hidden_states, batch: list[Rows], starts, tree: TreeBatch, requests, texts
    ) -> list[dict[int, int]] | None:
        """What the rule `match` would draw behind the nodes to be verified, were the small model the target; None where
        that is the likeliest token anyway."""
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
        """Puts the keys and values of the paths in order behind what is cached."""
        width = max(map(len, paths))
        table = np.array([path + [-1] * (width - len(path)) for path in paths], dtype=np.int32)
        counts = np.array([len(path) for path in paths], dtype=np.int32)
        path, count = (torch.from_numpy(each).to(cache.device) for each in (table, counts))
        self._model.ops.compact_kv(cache.k, cache.v, place.block_table, place.lengths, path, count)
