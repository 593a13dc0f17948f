"""An interrupt at any line of a call ends that call alone: the next one works and says the same."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

import specengine
from specengine import Engine, SamplingParams
from tests.engines import tiny_engine

ROOT = specengine.__path__[0]
PROMPTS = [[5, 9, 13, 5, 9], [7] * 300]
PARAMS = SamplingParams(max_new_tokens=5)


def traced(call: Callable[[], object], at_line: int = -1) -> tuple[int, bool]:
    """Calls with a SIGINT at one line of the package, counted from 0; returns the lines that ran, and whether it
    was interrupted."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(ROOT):
            return None
        if event == "line":
            lines += 1
            if lines == at_line + 1:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return lines, True
    finally:
        sys.settrace(before)
    return lines, False


def streamed(engine: Engine) -> list[int]:
    return [token for event in engine.stream(PROMPTS[0], PARAMS) for token in event.token_ids]


def ids(engine: Engine) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("call", [ids, streamed])
@pytest.mark.parametrize("stride", [pytest.param(7, marks=pytest.mark.full), 131])
def test_the_next_call_works_whatever_line_an_interrupt_meets(call, stride):
    engine = tiny_engine()
    call(engine)  # the prefix cache holds the prompts from now on
    expected, handler = call(engine), signal.getsignal(signal.SIGINT)
    lines, _ = traced(lambda: call(engine))
    assert lines > 1000
    for line in range(0, lines, stride):
        ran, interrupted = traced(lambda: call(engine), line)
        assert interrupted == (ran > line), line
        counts = engine.metrics.snapshot()
        assert (counts.running, counts.waiting, counts.pages_used) == (0, 0, 0), line
        signal.signal(signal.SIGINT, handler)  # one that passes signals on may have stayed
        assert call(engine) == expected, line


def test_an_interrupt_ends_a_long_prompt_after_the_pass_under_way(monkeypatch):
    engine = tiny_engine("none")
    rows, passes = engine.core.target.ops.prefill_rows, []
    hidden_states = type(engine.core.target).hidden_states

    def interrupted(*arguments):
        passes.append(len(passes))
        signal.raise_signal(signal.SIGINT)
        return hidden_states(*arguments)

    monkeypatch.setattr(type(engine.core.target), "hidden_states", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([7] * min(3 * rows, engine.model.config.max_position - 9), PARAMS)
    assert len(passes) == 1
