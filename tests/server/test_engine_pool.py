"""The pool makes an engine at the first request for it, and keeps a limited number."""

import asyncio
import threading

import pytest

from specengine import RankFailed, SamplingParams
from specengine.server.engine_pool import EngineKey, EnginePool
from specengine.server.errors import ApiError
from specengine.server.schema import Speculation
from specengine.server.settings import Settings
from specengine.types import GenerationOutput
from tests.engines import tiny_model
from tests.server.servers import ASK, LONG, SETTINGS, chat, chat_model, metrics, problem, served, streaming, total

PARAMS = SamplingParams(max_new_tokens=12)
DEFAULT = EngineKey("prompt_lookup,adaptive=false", "match")


def pool_of(**settings) -> EnginePool:
    return EnginePool(chat_model(), Settings(**SETTINGS | settings))


def asked(**speculation) -> Speculation:
    return Speculation(**speculation)


@pytest.mark.parametrize(
    ("speculation", "choice"),
    [
        ({}, DEFAULT),
        ({"off": True}, EngineKey("none", "match")),
        ({"drafter": "prompt_lookup"}, EngineKey("prompt_lookup", "match")),
        ({"rule": "traversal"}, EngineKey(DEFAULT.drafter, "traversal")),
        ({"max_nodes": 16}, DEFAULT),
        ({"max_nodes": 500}, DEFAULT),
        ({"max_nodes": 5}, EngineKey(f"{DEFAULT.drafter},nodes=4", "match")),
        ({"drafter": "prompt_lookup", "max_nodes": 2}, EngineKey("prompt_lookup,nodes=2", "match")),
        ({"drafter": "prompt-lookup", "max_nodes": 3}, EngineKey("prompt-lookup,nodes=2", "match")),
    ],
)
def test_a_request_gets_the_drafter_and_the_rule_it_asks_for(speculation, choice):
    pool = pool_of(drafters=(*SETTINGS["drafters"], "prompt-lookup"))
    assert pool.select(asked(**speculation)) == choice


def test_max_nodes_holds_for_every_drafter_that_takes_it():
    """Checks the drafters that need no files; `auto` is one of them for this model."""

    async def main() -> None:
        pool = pool_of(drafters=("auto", "suffix", "prompt_lookup,nodes=9"), max_engines=9)
        for drafter in ("auto", "suffix", "prompt_lookup,nodes=9"):
            async with pool.lease(pool.select(asked(drafter=drafter, max_nodes=6))) as engine:
                assert engine.engine.drafter.max_nodes == 4
        await pool.close()

    asyncio.run(main())


@pytest.mark.parametrize("drafter", ["none", "lookahead"])
def test_max_nodes_of_a_drafter_without_such_a_limit_is_refused(drafter):
    with pytest.raises(ApiError, match="has no such limit") as refused:
        pool_of(drafters=(drafter,)).select(asked(max_nodes=6))
    assert (refused.value.status, refused.value.param) == (400, "speculation.max_nodes")


def test_a_drafter_that_cannot_serve_a_rule_is_the_requests_fault():
    with served(rules=("match", "lossy")) as address:
        error = problem(chat(address, LONG | {"stream": False, "speculation": {"rule": "lossy"}}))
        assert error["param"] == "speculation.rule" and "drafters that do" in error["message"]
        assert chat(address).status_code == 200


def test_the_engine_that_nobody_used_for_longest_makes_room_and_the_default_one_stays():
    async def main() -> None:
        pool = pool_of(max_engines=3)
        a, b, c = (EngineKey("none", rule) for rule in ("match", "rejection", "traversal"))
        for choice in (a, b, a, c):  # b is the least recently used
            async with pool.lease(choice) as engine:
                output: GenerationOutput = await engine.generate([5, 6], PARAMS)
                assert len(output.token_ids) == 12 and engine.engine.rule.name == choice.rule
        kept = [(labels["drafter"], labels["rule"]) for labels, _ in pool.metrics]
        assert kept == [(DEFAULT.drafter, "match"), ("none", "match"), ("none", "traversal")]
        async with pool.lease(a), pool.lease(c):
            with pytest.raises(ApiError, match="all engines are in use") as refused:
                async with pool.lease(b):
                    pass
            assert refused.value.status == 503 and refused.value.headers["Retry-After"]
            async with pool.lease(DEFAULT), pool.lease(a):
                pass
        async with pool.lease(b):
            pass
        await pool.close()
        with pytest.raises(ApiError, match="shutting down"):
            async with pool.lease(EngineKey("none", "typical")):
                pass

    asyncio.run(main())


def test_one_place_serves_every_drafter_of_the_list_in_turn():
    with served(max_engines=1) as address:
        for speculation in (
            *({"drafter": drafter} for drafter in SETTINGS["drafters"]),
            {"off": True},
            {},
            {"max_nodes": 4},
        ):
            response = chat(address, ASK | {"seed": 3, "speculation": speculation | {"stats": True}})
            assert response.status_code == 200, response.text
            drafter = response.json()["choices"][0]["speculation"]["stats"]["drafter"]
            assert drafter.startswith(speculation.get("drafter", "none" if "off" in speculation else DEFAULT.drafter))
        assert len(metrics(address)["specengine_requests_running"].samples) == 1


def test_many_that_ask_at_once_get_one_engine():
    async def main() -> None:
        pool = pool_of()
        made = []
        original = pool._make_engine
        pool._make_engine = lambda choice: made.append(choice) or original(choice)

        async def one():
            async with pool.lease(EngineKey("none", "match")) as engine:
                return await engine.generate([5, 6], PARAMS)

        outputs = await asyncio.gather(*(one() for _ in range(5)))
        assert len(made) == 1 and len({tuple(output.token_ids) for output in outputs}) == 1
        await pool.close()

    asyncio.run(main())


def test_an_engine_whose_asker_left_meanwhile_is_there_for_the_next():
    async def main() -> None:
        pool = pool_of()
        made, begun, go_on = [], threading.Event(), threading.Event()
        original = pool._make_engine

        def slowly(choice):
            made.append(choice)
            begun.set()
            assert go_on.wait(30)
            return original(choice)

        pool._make_engine = slowly

        async def one():
            async with pool.lease(EngineKey("none", "match")) as engine:
                return engine

        leaving = asyncio.create_task(one())
        await asyncio.to_thread(begun.wait, 30)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        others = [asyncio.create_task(one()) for _ in range(2)]
        await asyncio.sleep(0)
        go_on.set()
        first, second = await asyncio.gather(*others)
        assert first is second and len(made) == 1
        await pool.close()

    asyncio.run(main())


def test_requests_of_different_engines_run_side_by_side(slow):
    stop = threading.Event()
    with served() as address:
        bodies = [LONG | {"speculation": each} for each in ({}, {"off": True}, {"rule": "rejection"})]
        threads = [streaming(address, body, stop) for body in bodies]
        assert total(address, "requests_running") == 3
        stop.set()
        for thread in threads:
            thread.join()


def test_a_process_that_fails_while_an_engine_is_made_is_said_to_have_failed(monkeypatch):
    def failing(self, choice):
        raise RankFailed("tensor_parallel: rank 1 failed")

    with served() as address:
        monkeypatch.setattr(EnginePool, "_make_engine", failing)
        response = chat(address, ASK | {"speculation": {"drafter": "none"}})
        assert response.status_code == 500 and problem(response)["code"] == "failed"


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(ValueError, match="model: random:tiny-llama has no tokenizer"):
        EnginePool(tiny_model(), Settings(**SETTINGS))
