"""An engine for many asyncio tasks: their requests share one running batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from collections.abc import Sequence as Seq

from specengine.engine.background_loop import Request, Worker
from specengine.engine.engine import Engine
from specengine.engine.metrics import Metrics
from specengine.engine.request import Sequence
from specengine.types import Outputs, Prompt, SamplingParams, StreamEvent


class AsyncEngine:
    """Serves requests in the order they came, as many at a time as the engine's max_batch_size.

    A text is what the request would get alone. Requests join and leave between two cycles, and are held up there by
    other ones' prompts for less than two passes of the target. Any event loop may call, and the engine stays usable.

    max_waiting: sequences (prompts times n) in the queue, at most.
    A deadline is in seconds from the request on: the text then ends where it is, perhaps empty, with finish_reason
    `deadline`. A task that is cancelled, or a stream that is closed, leaves at the end of the cycle under way.
    Used as `async with`, it finishes its requests at the end, or drops them where an exception is the reason.
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
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        deadline: float | None = None,
    ) -> Outputs:
        """As Engine.generate, with a deadline in seconds.

        Raises ValueError, Overloaded where there is no place in the queue, Closed, and GenerationFailed where a pass
        of the model or drafter fails.
        """
        groups, single = self.engine._groups(prompts, params)
        sequences = self._all(groups)
        if sequences:
            call = _Call(sequences, deadline)
            try:
                self._worker.submit(call.request)
                await call.answer()
            finally:
                call.request.cancelled = True
        return self.engine._results(groups, single)

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        deadline: float | None = None,
    ) -> AsyncGenerator[StreamEvent, None]:
        """As Engine.stream, with a deadline in seconds; the request is made when the iteration begins.

        Takes what generate() takes: the texts of several prompts, and of n samples, come mixed, told apart by the
        event's `index`; each has a last event with its output. They are one request, taken or refused as a whole.
        Raises ValueError at once; Overloaded, Closed and GenerationFailed while iterating, as generate().
        """
        _check_deadline(deadline)
        sequences = self._all(self.engine._groups(prompts, params)[0])
        for index, sequence in enumerate(sequences):
            sequence.index = index
        return self._events(sequences, deadline)

    def _all(self, groups: Seq[Seq[Sequence]]) -> list[Sequence]:
        sequences = [sequence for group in groups for sequence in group]
        if len(sequences) > self.max_waiting:
            raise ValueError(f"prompts: {len(sequences)} sequences never fit into a queue of {self.max_waiting}")
        return sequences

    async def _events(self, sequences: list[Sequence], deadline: float | None) -> AsyncGenerator[StreamEvent, None]:
        if not (left := len(sequences)):
            return
        call = _Call(sequences, deadline, streams=True)
        try:
            self._worker.submit(call.request)
            while left and (event := await call.answer()):
                yield event
                left -= event.output is not None
        finally:
            call.request.cancelled = True

    async def close(self, drain: bool = True) -> None:
        """Takes no more requests; finishes those there are, or (drain=False) drops them: their callers get Closed."""
        self._worker.stop(drain)
        await asyncio.to_thread(self._worker.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=kind is None)


class _Call:
    """A request and what its task has been told of it."""

    def __init__(self, sequences: list[Sequence], deadline: float | None, streams: bool = False) -> None:
        _check_deadline(deadline)
        self._told: asyncio.Queue[StreamEvent | Exception | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(answer: StreamEvent | Exception | None) -> None:
            loop.call_soon_threadsafe(self._told.put_nowait, answer)

        self.request = Request(sequences, tell, streams, deadline)

    async def answer(self) -> StreamEvent | None:
        answer = await self._told.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _check_deadline(deadline: float | None) -> None:
    good = deadline is None or (isinstance(deadline, int | float) and not isinstance(deadline, bool) and deadline > 0)
    if not good:
        raise ValueError(f"deadline: expected a positive number of seconds or None, got {deadline!r}")
