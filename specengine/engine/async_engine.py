"""An engine for many asyncio tasks: their groups share one running batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from specengine.engine.background_loop import RequestGroup, Worker
from specengine.engine.engine import Engine
from specengine.engine.metrics import Metrics
from specengine.engine.request import Request
from specengine.types import Outputs, Prompt, SamplingParams, StreamEvent


class AsyncEngine:
    """Serves groups in the order they came, as many at a time as the engine's max_batch_size.

    A text is what the group would get alone. Requests join and leave between two cycles, and are held up there by
    other ones' prompts for less than two passes of the target. Any event loop may call, and the engine stays usable.

    max_waiting: requests (prompts times n) in the queue, at most.
    A deadline is in seconds from the group on: the text then ends where it is, perhaps empty, with finish_reason
    `deadline`. A task that is cancelled, or a stream that is closed, leaves at the end of the cycle under way.
    Used as `async with`, it finishes its groups at the end, or drops them where an exception is the reason.
    Raises ValueError naming the argument.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 256) -> None:
        if not isinstance(engine, Engine):
            raise ValueError(f"engine: expected an Engine, got {type(engine).__name__}")
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise ValueError(f"max_waiting: expected a positive integer, got {max_waiting!r}")
        self.engine, self.max_waiting = engine, max_waiting
        self._worker = Worker(engine, max_waiting)

    @property
    def metrics(self) -> Metrics:
        """Those of the engine."""
        return self.engine.metrics

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        deadline: float | None = None,
    ) -> Outputs:
        """As Engine.generate, with a deadline in seconds.

        Raises ValueError, Overloaded where there is no place in the queue, Closed, and GenerationFailed where a pass
        of the model or drafter fails.
        """
        groups, single = self.engine._groups(prompts, params)
        requests = self._all(groups)
        if requests:
            call = _Call(requests, deadline)
            try:
                self._worker.submit(call.group)
                await call.answer()
            finally:
                call.group.cancelled = True
        return self.engine._results(groups, single)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        deadline: float | None = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """As Engine.stream, with a deadline in seconds; the group is made when the iteration begins.

        Takes what generate() takes: the texts of several prompts, and of n samples, come mixed, told apart by the
        event's `index`; each has a last event with its output. They are one group, taken or refused as a whole.
        Raises ValueError at once; Overloaded, Closed and GenerationFailed while iterating, as generate().
        """
        _check_deadline(deadline)
        requests = self._all(self.engine._groups(prompts, params)[0])
        for index, request in enumerate(requests):
            request.index = index
        return self._events(requests, deadline)

    def _all(self, groups: Sequence[Sequence[Request]]) -> list[Request]:
        requests = [request for group in groups for request in group]
        if len(requests) > self.max_waiting:
            raise ValueError(f"prompts: {len(requests)} requests never fit into a queue of {self.max_waiting}")
        return requests

    async def _events(self, requests: list[Request], deadline: float | None) -> AsyncGenerator[StreamEvent, None]:
        if not (left := len(requests)):
            return
        call = _Call(requests, deadline, streams=True)
        try:
            self._worker.submit(call.group)
            while left and (event := await call.answer()):
                yield event
                left -= event.output is not None
        finally:
            call.group.cancelled = True

    async def close(self, drain: bool = True) -> None:
        """Takes no more groups; finishes those there are, or (drain=False) drops them: their callers get Closed."""
        self._worker.stop(drain)
        await asyncio.to_thread(self._worker.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=kind is None)


class _Call:
    """A group and what its task has been told of it."""

    def __init__(self, requests: list[Request], deadline: float | None, streams: bool = False) -> None:
        _check_deadline(deadline)
        self._told: asyncio.Queue[StreamEvent | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(answer: StreamEvent | Exception | None) -> None:
            loop.call_soon_threadsafe(self._told.put_nowait, answer)

        self.group = RequestGroup(requests, tell, streams, deadline)

    async def answer(self) -> StreamEvent | None:
        answer = await self._told.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _check_deadline(deadline: float | None) -> None:
    good = deadline is None or (isinstance(deadline, int | float) and not isinstance(deadline, bool) and deadline > 0)
    if not good:
        raise ValueError(f"deadline: expected a positive number of seconds or None, got {deadline!r}")
