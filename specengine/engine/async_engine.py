"""An engine for many asyncio tasks: their requests share one running batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from specengine.engine.background_loop import BackgroundLoop, Submission, clock
from specengine.engine.engine import Engine
from specengine.engine.metrics import Metrics
from specengine.engine.prompts import prompt_size
from specengine.engine.request import Request
from specengine.engine.request_group import RequestGroup
from specengine.types import Outputs, Prompt, SamplingParams, StreamEvent

LONG_PROMPT = 10_000  # characters, which take about 6 ms to tokenise, or token ids


class AsyncEngine:
    """Serves requests first come, first served, max_batch_size of the engine at a time, from any event loop.

    Every text equals the text of the request alone. Requests join and leave between two cycles. The prompts of other
    requests delay a running one by less than two passes of the target.

    Short calls enter the queue in their order. Chats, constraints, and more than 10,000 characters or token ids are
    prepared in a thread while the event loop goes on, and enter the queue when they are ready.

    max_waiting: requests (prompts times n) in the queue, at most, beside those for which the batch has a place.
    A deadline counts seconds from the call: the text then ends where it is, perhaps empty, with finish_reason
    `deadline`. A cancelled task or a closed stream leaves at the end of the running cycle. `async with` finishes
    the requests at its end, or drops them when an exception is the reason.
    Raises ValueError naming the argument.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 256) -> None:
        if not isinstance(engine, Engine):
            raise ValueError(f"engine: expected an Engine, got {type(engine).__name__}")
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise ValueError(f"max_waiting: expected a positive integer, got {max_waiting!r}")
        self.engine, self.max_waiting = engine, max_waiting
        self.loop = BackgroundLoop(engine.core, max_waiting)

    @property
    def metrics(self) -> Metrics:
        """The counters of the engine."""
        return self.engine.metrics

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        deadline: float | None = None,
    ) -> Outputs:
        """Works as Engine.generate does, with a deadline in seconds.

        Raises ValueError; Overloaded when the queue is full; Closed; GenerationFailed when a pass of the target or of
        the drafter fails.
        """
        _check_deadline(deadline)
        began = clock()
        if _takes_long(prompts, params):
            group = await asyncio.to_thread(self._prepare, prompts, params)
        else:
            group = self._prepare(prompts, params)
        if group.requests:
            call = _Call(group.requests, began, deadline)
            try:
                self.loop.submit(call.submission)
                await call.news()
            finally:
                call.submission.cancelled = True
        return group.outputs(self.engine.rule)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        deadline: float | None = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Works as Engine.stream does, with a deadline in seconds; submits when the iteration begins.

        Takes the prompts and n that generate() takes. Events of several texts come mixed: their `index` tells them
        apart, and the last event of each carries its output. The queue takes all requests of a call or none.
        Raises ValueError at once, of what a thread prepares while iterating; Overloaded, Closed and
        GenerationFailed while iterating, as generate() does.
        """
        _check_deadline(deadline)
        group = None if _takes_long(prompts, params) else self._prepare(prompts, params)
        return self._events(group, prompts, params, deadline)

    def _prepare(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> RequestGroup:
        return self.engine.prepare(prompts, params, self.engine.core.max_batch_size + self.max_waiting)

    async def _events(
        self,
        group: RequestGroup | None,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        deadline: float | None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """Yields the events of a call.  group: its requests; None: a thread makes them."""
        began = clock()
        if group is None:
            group = await asyncio.to_thread(self._prepare, prompts, params)
        for index, request in enumerate(requests := group.requests):
            request.index = index
        if not (left := len(requests)):
            return
        call = _Call(requests, began, deadline, streams=True)
        try:
            self.loop.submit(call.submission)
            while left and (event := await call.news()):
                yield event
                left -= event.output is not None
        finally:
            call.submission.cancelled = True

    async def close(self, drain: bool = True) -> None:
        """Refuses further requests; finishes the present ones, or drops them with Closed where drain is False."""
        self.loop.stop(drain)
        await asyncio.to_thread(self.loop.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=kind is None)


class _Call:
    """A submission whose news a task awaits.  deadline: seconds from `began` on."""

    def __init__(self, requests: list[Request], began: float, deadline: float | None, streams: bool = False) -> None:
        self._news: asyncio.Queue[StreamEvent | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def notify(news: StreamEvent | Exception | None) -> None:
            loop.call_soon_threadsafe(self._news.put_nowait, news)

        left = None if deadline is None else deadline - (clock() - began)
        self.submission = Submission(requests, notify, streams, left)

    async def news(self) -> StreamEvent | None:
        news = await self._news.get()
        if isinstance(news, Exception):
            raise news
        return news


def _takes_long(prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> bool:
    """Returns whether preparing a call may take more than some milliseconds, so that a thread should do it."""
    several = [params] if isinstance(params, SamplingParams) else params or ()
    known = [own for own in several if isinstance(own, SamplingParams)]
    copies = max((own.n for own in known), default=1)
    return prompt_size(prompts) * copies > LONG_PROMPT or any(own.constraint for own in known)


def _check_deadline(deadline: float | None) -> None:
    good = deadline is None or (isinstance(deadline, int | float) and not isinstance(deadline, bool) and deadline > 0)
    if not good:
        raise ValueError(f"deadline: expected a positive number of seconds or None, got {deadline!r}")
