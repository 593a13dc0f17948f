"""Constraints of an AsyncEngine compile in threads."""

import asyncio
import threading

from specengine import AsyncEngine, Engine, SamplingParams
from tests.constraints.vocabulary import CHOICES, talking_model


def test_a_constraint_compiles_beside_the_event_loop():
    engine, threads = Engine(talking_model(), rule="match"), []
    made = engine.model.grammars._compile

    def compiled(*given):
        threads.append(threading.current_thread())
        return made(*given)

    engine.model.grammars._compile = compiled

    async def serve():
        async with AsyncEngine(engine) as server:
            return await server.generate([1, 2], SamplingParams(choices=CHOICES))

    assert asyncio.run(serve()).text in CHOICES
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
