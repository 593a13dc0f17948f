"""Prefill: the prompt's keys and values, in passes between which other requests run their cycles."""

from __future__ import annotations

import time
from collections.abc import Iterator

from specengine.draft_trees.tree import TreeBatch
from specengine.drafters.capabilities import PromptObserver
from specengine.engine.core import EngineCore
from specengine.engine.request import Request


def prefill(core: EngineCore, request: Request) -> Iterator[int]:
    """Caches a prompt without its last token, which is the root of the first cycle. Yields the rows of each pass.

    The prefix hit needs no pass.
    """
    began = time.perf_counter()
    target, step, prompt = core.target, core.target.ops.prefill_rows, request.tokens[:-1]
    target.ensure_positions(request.prompt_length + request.limit)
    kept = request.sharing.step if request.sharing is not None and core.cache.states is not None else 0
    for start, stop in passes(request.stats.prefix_hit, len(prompt), step, kept):
        with core.turn():
            rows = TreeBatch.chains([prompt[start:stop]], target.device)
            place = core.cache.batch([request.pages], [start], [request.adapter_index])
            hidden_states = target.hidden_states(rows, core.cache, place)
            if isinstance(core.drafter, PromptObserver):
                core.drafter.observe_prompt(request, start, hidden_states)
            request.cached = stop
            core.share_pages(request)
            if kept and request.sharing is not None:
                core.cache.keep_state(request.pages, stop, request.sharing)
        yield len(rows.tokens)
    request.stats.start_decoding(began)


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
