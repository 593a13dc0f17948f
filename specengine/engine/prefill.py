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
    for start in range(request.stats.prefix_hit, len(prompt), step):
        with core.turn():
            rows = TreeBatch.chains([prompt[start : start + step]], target.device)
            place = core.cache.batch([request.pages], [start], [request.adapter_index])
            hidden_states = target.hidden_states(rows, core.cache, place)
            if isinstance(core.drafter, PromptObserver):
                core.drafter.observe_prompt(request, start, hidden_states)
            request.cached = min(start + step, len(prompt))
            core.share_pages(request)
        yield len(rows.tokens)
    request.stats.start_decoding(began)
