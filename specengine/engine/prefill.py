"""Prefill: the keys and values of prompts, in passes between which other requests run their cycles."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from specengine.draft_trees.tree import TreeBatch
from specengine.engine.core import EngineCore
from specengine.engine.request import Request
from specengine.models.hidden_states import HiddenStates


@dataclass(eq=False)
class Prompt:
    """A prompt that is being read.

    pieces: first and last + 1 token of each pass to come.  kept: see passes().  began: time of its first pass, later by
    what the rows of other prompts took; None before.
    """

    request: Request
    pieces: deque[tuple[int, int]]
    kept: int
    began: float | None = None

    @property
    def rows(self) -> int:
        """The rows of all passes to come."""
        return self.pieces[-1][1] - self.pieces[0][0] if self.pieces else 0

    def fills_pages_of(self, request: Request) -> bool:
        """Returns whether its passes to come fill pages that another request could share."""
        if not self.pieces or self.request.sharing is None:
            return False
        step = self.request.sharing.step
        end = (self.pieces[0][0] // step + 1) * step + 1  # a page is found by its tokens and the one behind them
        known = min(self.request.prompt_length, len(request.tokens) - 1)
        return end <= known and request.tokens[:end] == self.request.tokens[:end]


class Prefill:
    """Caches the prompts of admitted requests without their last tokens, which are the roots of the first cycles.

    A pass has the next pieces of the prompts with the fewest rows to come, as far as they fit into its rows whole, so
    short prompts pass between the pieces of a long one. A pass without the prompt that came first is followed by one
    that begins with it, so every prompt is read.
    A prompt has the pieces that it has alone, so the states that other requests can find end where they always do.
    Without strict arithmetic other requests find pages of whole passes, and these have no room for another prompt.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._prompts = core, list[Prompt]()
        self._left_out: Prompt | None = None  # by the last pass, though it came first

    @property
    def requests(self) -> list[Request]:
        """All requests that are being read."""
        return [prompt.request for prompt in self._prompts]

    @property
    def has_room(self) -> bool:
        """Whether a pass of the short prompts, which fit into one, has rows for one more."""
        most = self._core.target.ops.prefill_rows
        return sum(prompt.rows for prompt in self._prompts if prompt.rows <= most) < most

    @property
    def next_rows(self) -> int:
        """The rows of the next pass."""
        return sum(stop - start for start, stop in (prompt.pieces[0] for prompt in self._next()))

    def fills_pages_of(self, request: Request) -> bool:
        """Returns whether a waiting request finds more of its prompt in the prefix cache when it is admitted later."""
        sharing = self._core.sharing_of(request.adapter)
        return any(p.request.sharing is sharing and p.fills_pages_of(request) for p in self._prompts)

    def add(self, request: Request) -> None:
        """Begins with a prompt, which has its pages. The prefix hit needs no pass."""
        target, cache = self._core.target, self._core.cache
        target.ensure_positions(request.prompt_length + request.limit)
        kept = request.sharing.step if request.sharing is not None and cache.states is not None else 0
        pieces = passes(request.stats.prefix_hit, request.prompt_length - 1, target.ops.prefill_rows, kept)
        self._prompts.append(Prompt(request, deque(pieces), kept))

    def next_requests(self) -> list[Request]:
        """Returns the requests of the next pass."""
        return [prompt.request for prompt in self._next()]

    def run(self) -> int:
        """Runs the next pass; returns its rows, 0 where every prompt is cached."""
        core, prompts = self._core, self._next()
        if not prompts:
            return 0
        first = next(prompt for prompt in self._prompts if prompt.pieces)
        self._left_out = None if first in prompts else first
        began = time.perf_counter()
        pieces = [prompt.pieces[0] for prompt in prompts]
        sizes = [stop - start for start, stop in pieces]
        with core.turn():
            runs = [p.request.tokens[start:stop] for p, (start, stop) in zip(prompts, pieces, strict=True)]
            rows = TreeBatch.chains(runs, core.target.device)
            requests = [prompt.request for prompt in prompts]
            adapters = [request.adapter_index for request in requests]
            place = core.cache.batch([request.pages for request in requests], [start for start, _ in pieces], adapters)
            hidden_states = core.target.hidden_states(rows, core.cache, place)
            for prompt, own in zip(prompts, hidden_states.split(sizes), strict=True):
                self._end_piece(prompt, own)
        seconds = time.perf_counter() - began
        for prompt, size in zip(prompts, sizes, strict=True):
            prompt.began = (began if prompt.began is None else prompt.began) + seconds * (1 - size / sum(sizes))
        return sum(sizes)

    def take_cached(self) -> list[Request]:
        """Returns the requests whose prompts are cached; they are no longer being read."""
        cached = [prompt for prompt in self._prompts if not prompt.pieces]
        self._prompts = [prompt for prompt in self._prompts if prompt.pieces]
        for prompt in cached:
            prompt.request.stats.start_decoding(time.perf_counter() if prompt.began is None else prompt.began)
        return [prompt.request for prompt in cached]

    def take_ended(self) -> list[Request]:
        """Returns the requests that ended before their prompts were cached; they are no longer being read."""
        ended = [prompt.request for prompt in self._prompts if prompt.request.finish_reason]
        self._prompts = [prompt for prompt in self._prompts if not prompt.request.finish_reason]
        return ended

    def take_all(self) -> list[Request]:
        """Returns all requests, none of which is being read from now on."""
        requests, self._prompts = self.requests, []
        return requests

    def _next(self) -> list[Prompt]:
        """Returns the prompts of the next pass."""
        order = sorted((prompt for prompt in self._prompts if prompt.pieces), key=lambda prompt: prompt.rows)
        if self._left_out in order:
            order.sort(key=lambda prompt: prompt is not self._left_out)
        chosen, rows = list[Prompt](), 0
        for prompt in order:
            start, stop = prompt.pieces[0]
            rows += stop - start
            if rows > self._core.target.ops.prefill_rows:
                break
            chosen.append(prompt)
        return chosen

    def _end_piece(self, prompt: Prompt, hidden_states: HiddenStates) -> None:
        """Shows a piece to the drafter, and its pages to other requests."""
        core, request = self._core, prompt.request
        start, stop = prompt.pieces.popleft()
        core.drafter.observe_prompt(request, start, hidden_states)
        request.cached = stop
        core.share_pages(request)
        if prompt.kept and request.sharing is not None:
            core.cache.keep_state(request.pages, stop, request.sharing)


def passes(start: int, end: int, step: int, kept: int) -> Iterator[tuple[int, int]]:
    """Yields first and last + 1 of each pass over tokens [start, end).

    kept: of a hybrid, the tokens whose multiples the same prompt can find. One pass ends with the last of them, so that
    the state behind it can be kept. 0: no state is kept.
    """
    border = (end - 1) // kept * kept if kept else end
    while start < end:
        stop = min(start + step, border if start < border else end)
        yield start, stop
        start = stop
