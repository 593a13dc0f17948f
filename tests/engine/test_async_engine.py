"""Many requests, one running batch: texts, order, room."""

import asyncio
import dataclasses
import threading
from contextlib import nullcontext

import pytest

from specengine import AsyncEngine, Engine, Overloaded, SamplingParams
from specengine.tensor_parallel.loading import load_model
from specengine.utils.fair_lock import FairLock
from tests.engine.gated import collected, gated, run
from tests.engines import GREEDY, SAMPLED, SHAPED, ids, oracle_engine, tiny_engine
from tests.selection import wide

PROMPTS = [
    [5, 9, 13, 5, 9],
    [7],
    list(range(3, 90)),
    [11, 12, 11, 12, 11, 12, 11],
    [200] * 9,
    [3 + i for i in range(40)],
]
DRAFTERS = [
    "none",
    "prompt_lookup,adaptive=false",
    "suffix,adaptive=false,remember=1000",
    "draft-model:self,layers=1,length=3,adaptive=false",
    "lookahead,adaptive=false,warm=true,window=3,ngram=3,guesses=3",
    "ouroboros:self,layers=1,adaptive=false,window=2,ngram=3,length=3",
]


async def mixed(serving: AsyncEngine, params: list[SamplingParams], turn: FairLock | None = None) -> list[list[int]]:
    """A request per prompt and parameters: each begins when the one before has got its first tokens.

    turn: of the engine. With it all requests wait in the queue before the first cycle begins.
    """

    async def stream(prompt, one, begun: asyncio.Event) -> list[int]:
        tokens = []
        async for event in serving.stream(prompt, one):
            tokens += event.token_ids
            begun.set()
        return tokens

    async def generate(prompt, one, begun: asyncio.Event) -> list[int]:
        begun.set()
        return (await serving.generate(prompt, one)).token_ids

    tasks = []
    with turn or nullcontext():
        for i, (one, prompt) in enumerate((one, prompt) for one in params for prompt in PROMPTS):
            begun = asyncio.Event()
            tasks.append(asyncio.create_task((generate if i % 3 == 2 else stream)(prompt, one, begun)))
            await (asyncio.sleep(0) if turn else begun.wait())
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("drafter", [*DRAFTERS, "oracle"])
def test_requests_that_come_and_go_get_the_texts_they_get_alone(drafter):
    params = [GREEDY, SAMPLED, SHAPED]
    alone = [tiny_engine("none").generate(prompt, one).token_ids for one in params for prompt in PROMPTS]
    if drafter == "oracle":
        params, alone = params[:1], alone[: len(PROMPTS)]
        engine = oracle_engine(PROMPTS, GREEDY, max_batch_size=4)
    else:
        engine = tiny_engine(drafter, max_batch_size=4)

    async def main() -> list[list[int]]:
        async with AsyncEngine(engine) as serving:
            # A text of nine cycles may end before the next request has come: these six queue for four places.
            return await mixed(serving, params, engine.core.lock if drafter == "oracle" else None)

    assert run(main()) == alone
    counts = engine.metrics.snapshot()
    assert counts.request_cycles > 1.5 * counts.cycles, "they were not batched"
    assert engine.cache.pages_in_use == 0


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup,adaptive=false"])
def test_a_stream_of_several_prompts_and_samples_tells_them_apart(drafter):
    params = [
        dataclasses.replace(SAMPLED, n=3, logprobs=2, trace=True, ignore_eos=True, max_new_tokens=20 + 9 * i)
        for i in range(2)
    ]
    alone = [o for group in tiny_engine("none").generate(PROMPTS[:2], params) for o in group]
    engine = tiny_engine(drafter, max_batch_size=4)

    async def main() -> list[list]:
        async with AsyncEngine(engine) as serving:
            events = [[] for _ in alone]
            async for event in serving.stream(PROMPTS[:2], params):
                assert not events[event.index] or events[event.index][-1].output is None, "something follows the end"
                events[event.index].append(event)
            return events

    for events, own in zip(run(main()), alone, strict=True):
        output = events[-1].output
        assert [token for event in events for token in event.token_ids] == output.token_ids == own.token_ids
        assert [one for event in events for one in event.logprobs] == output.logprobs == own.logprobs
        assert [cycle for event in events for cycle in event.trace] == output.trace
        assert len(events) == output.stats.cycles


def test_events_say_nothing_of_what_was_not_asked_for():
    (event, *_) = tiny_engine("none").stream([5], GREEDY)
    assert (event.index, event.logprobs, event.trace) == (0, None, None)


def test_a_request_joins_at_the_next_cycle_and_leaves_with_its_last():
    engine, gate = gated()
    a, b = (5, 6), (7, 8)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            first = asyncio.create_task(serving.generate(a, SamplingParams(max_new_tokens=9)))
            await gate.reached()
            second = asyncio.create_task(collected(serving.stream(b, SamplingParams(max_new_tokens=2))))
            await asyncio.sleep(0)  # it is in the queue now
            await gate.passed(4)
            await second
            gate.open()
            await first

    run(main())
    assert gate.batches == [[a], [a, b], [a, b], *[[a]] * 6]


def test_places_are_given_in_the_order_of_arrival():
    engine, gate = gated(max_batch_size=2)
    prompts = [(5 + i,) for i in range(6)]

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            tasks = []
            for i, prompt in enumerate(prompts):
                params = SamplingParams(max_new_tokens=1 + i % 2)
                tasks.append(asyncio.create_task(serving.generate(prompt, params)))
                await (asyncio.sleep(0) if i else gate.reached())
            gate.open()
            await asyncio.gather(*tasks)

    run(main())
    a, b, c, d, e, f = prompts
    assert gate.batches == [[a], [b, c], [b, d], [d, e], [f], [f]]


def test_a_stream_goes_on_while_long_prompts_are_read():
    engine, order = tiny_engine("none"), []
    target, most = engine.model.target, engine.model.target.ops.prefill_rows
    long = [[3 + (i + first) % 200 for i in range(400)] for first in range(4)]
    original = target.hidden_states

    def hidden_states(tree, *rest):  # forward calls it too, with one row per request
        order.append(len(tree.tokens))
        return original(tree, *rest)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            stream = serving.stream([5, 6], SamplingParams(max_new_tokens=200))
            await anext(stream)
            others = asyncio.create_task(serving.generate(long, SamplingParams(max_new_tokens=1)))
            assert len(await collected(stream, skipped=1)) == 199
            await others

    target.hidden_states = hidden_states
    try:
        run(main())
    finally:
        del target.hidden_states
    passes = [i for i, rows in enumerate(order) if rows > 8]
    assert sum(order[i] for i in passes) == 4 * 399
    between, held_up = 0, []
    for rows in order[passes[0] : passes[-1] + 1]:
        between = between + rows if rows > 8 else 0
        held_up.append(between)
    assert held_up.count(0) >= 3 and most <= max(held_up) < 2 * most


def test_short_prompts_that_came_together_start_together():
    engine, gate = gated()
    prompts = [(5 + i,) * 8 for i in range(5)]

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            first = asyncio.create_task(serving.generate([3], GREEDY))
            await gate.reached()
            several = asyncio.create_task(serving.generate(prompts, GREEDY))
            await asyncio.sleep(0)
            await gate.passed()
            assert gate.batches[1] == [(3,), *prompts]
            gate.open()
            await asyncio.gather(first, several)

    run(main())


def test_lists_of_prompts_and_several_samples_come_back_in_their_order():
    engine = tiny_engine(max_batch_size=3)
    params = dataclasses.replace(SAMPLED, n=3)
    expected = [ids(group) for group in engine.generate(PROMPTS[:2], params)]

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            groups = await serving.generate(PROMPTS[:2], params)
            assert [ids(group) for group in groups] == expected
            assert ids(await serving.generate(PROMPTS[0], params)) == expected[0]
            assert await serving.generate([], params) == []
            several = await serving.generate(PROMPTS[:2], [GREEDY, SAMPLED])
            assert [output.prompt_token_ids for output in several] == PROMPTS[:2]

    run(main())


def test_threads_with_the_plain_engine_and_two_event_loops_run_beside_each_other():
    engine = tiny_engine(max_batch_size=2)
    expected, found = ids(engine.generate(PROMPTS, SAMPLED)), {}
    serving = AsyncEngine(engine)

    async def main(name) -> None:
        found[name] = ids(await asyncio.gather(*(serving.generate(prompt, SAMPLED) for prompt in PROMPTS)))

    threads = [threading.Thread(target=lambda i=i: run(main(i))) for i in range(2)]
    threads += [
        threading.Thread(target=lambda i=i: found.update({i: ids(engine.generate(PROMPTS, SAMPLED))})) for i in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run(serving.close())
    assert found == dict.fromkeys(range(4), expected)


def test_requests_with_a_place_in_the_batch_do_not_count_as_waiting():
    engine, gate = gated(max_batch_size=6)

    async def main() -> None:
        async with AsyncEngine(engine, max_waiting=1) as serving:
            first = asyncio.create_task(serving.generate([5], GREEDY))
            await gate.reached()
            others = [asyncio.create_task(serving.generate([6 + i], GREEDY)) for i in range(6)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="room for 1 requests: 1 are waiting, 1 more"):
                await serving.generate([20], GREEDY)
            gate.open()
            await asyncio.gather(first, *others)

    run(main())


def test_a_full_queue_refuses_and_has_room_again_later():
    engine, gate = gated(max_batch_size=1)

    async def main() -> None:
        async with AsyncEngine(engine, max_waiting=2) as serving:
            first = asyncio.create_task(serving.generate([5], GREEDY))
            await gate.reached()  # it is in the batch
            second = asyncio.create_task(serving.generate([[6], [7]], GREEDY))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match=r"room for 2 requests: 2 are waiting, 1 more"):
                await serving.generate([8], GREEDY)
            with pytest.raises(Overloaded):
                await anext(serving.stream([8], GREEDY))
            counts = serving.metrics.snapshot()
            assert (counts.refused, counts.running) == (2, 1)
            gate.open()
            await asyncio.gather(first, second)
            assert (await serving.generate([8], GREEDY)).token_ids

    run(main())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.generate([[3]] * 11), "prompts: 11 requests never fit into the 10 places of batch and queue"),
        (lambda s: s.generate([3], deadline=0), "deadline: expected a positive number of seconds or None, got 0"),
        (lambda s: s.generate([3], deadline="soon"), "deadline: expected"),
        (lambda s: s.generate([]), None),
        (lambda s: s.generate([3], SamplingParams(stop="x")), "stop: this model has no tokenizer"),
        (lambda s: s.stream([3], deadline=-1), "deadline: expected"),
        (lambda s: s.stream([[3]] * 6, SamplingParams(n=2)), "prompts: 12 requests never fit into the 10 places"),
        (lambda s: AsyncEngine("smollm2-135m"), "engine: expected an Engine, got str"),
        (lambda s: AsyncEngine(s.engine, max_waiting=0), "max_waiting: expected a positive integer, got 0"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(call, message):
    async def main() -> None:
        async with AsyncEngine(tiny_engine(max_batch_size=2), max_waiting=8) as serving:
            answer = call(serving)  # of a stream's arguments before anything is awaited
            await answer

    if message is None:
        run(main())
        return
    with pytest.raises(ValueError, match=message):
        run(main())


@pytest.mark.full
@pytest.mark.model
@pytest.mark.parametrize("drafter", wide(["auto", "prompt_lookup", "eagle3"]))
def test_the_real_model_says_the_same_to_many_with_stop_strings(smollm2_path, drafter):
    model = load_model(smollm2_path, device="cpu")
    chats = [[{"role": "user", "content": f"Count from {i} to {i + 9}, with commas."}] for i in range(1, 4)]
    params = [
        SamplingParams(max_new_tokens=32, stop=[", "]),
        SamplingParams(max_new_tokens=32, temperature=0.8, seed=3, stop=["\n\n"]),
    ]
    alone = [Engine(model, drafter="none").generate(chat, one) for chat in chats for one in params]
    engine = Engine(model, drafter=drafter, max_batch_size=4)

    async def text(stream) -> tuple[str, str]:
        events = [event async for event in stream]
        assert "".join(event.text for event in events) == events[-1].output.text
        return events[-1].output.text, events[-1].output.finish_reason

    async def main() -> list:
        async with AsyncEngine(engine) as serving:
            return await asyncio.gather(*(text(serving.stream(chat, one)) for chat in chats for one in params))

    assert run(main()) == [(output.text, output.finish_reason) for output in alone]
    assert any(output.finish_reason == "stop" for output in alone)
