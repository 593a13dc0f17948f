"""Short prompts are read between the pieces of long ones, which are read all the same. All counts are of steps."""

from __future__ import annotations

import dataclasses
import random

import pytest

from specengine import Engine, SamplingParams
from specengine.engine.scheduler import Scheduler
from specengine.ops import native
from specengine.tensor_parallel.loading import load_model
from tests.engines import ids

ROWS = 16  # of a pass, so that a prompt of 480 tokens has 30 pieces
ONE = SamplingParams(max_new_tokens=1)


def small_passes(max_batch_size: int = 16) -> Engine:
    model = load_model("random:tiny-llama", device="cpu", ops=dataclasses.replace(native, prefill_rows=ROWS))
    return Engine(model, drafter="none", max_batch_size=max_batch_size)


def prompt(first: int, tokens: int) -> list[int]:
    return [first, *(3 + (first + 5 * i * i + i) % 240 for i in range(tokens - 1))]


@pytest.mark.parametrize("arrives", [0, 1, 2, 7])
@pytest.mark.parametrize(
    "long", [[prompt(5, 480)], [prompt(5 + i, 480) for i in range(3)], [prompt(5, 480)] * 3], ids=["1", "3", "alike"]
)
def test_a_short_prompt_has_its_first_token_after_three_steps_behind_any_long_ones(long, arrives):
    engine = small_passes()
    scheduler = Scheduler(engine.core, max_prefill_rows=ROWS)
    before, (short,) = engine.prepare(long, ONE).requests, engine.prepare(prompt(90, 10), ONE).requests
    scheduler.add(before)
    for _ in range(arrives):
        scheduler.step()
    scheduler.add([short])
    for _ in range(3):
        scheduler.step()
    assert short.finish_reason == "length" and not any(request.finish_reason for request in before)
    while scheduler.has_unfinished_requests:
        scheduler.step()
    alone = small_passes(max_batch_size=1).generate([*long, prompt(90, 10)], ONE)
    assert [request.output_ids for request in (*before, short)] == ids(alone)


@pytest.mark.parametrize("tokens", [10, ROWS + 1, 40])
def test_a_long_prompt_is_read_though_shorter_ones_never_end(tokens):
    engine = small_passes()
    scheduler = Scheduler(engine.core, max_prefill_rows=ROWS)
    (long,) = engine.prepare(prompt(5, 480), ONE).requests
    scheduler.add([long])
    for step in range(2 * 30 + 2):  # every second pass begins with the prompt that came first
        scheduler.add(engine.prepare(prompt(6 + step % 200, tokens), ONE).requests)
        scheduler.step()
    assert long.finish_reason == "length"
    scheduler.close()


def test_no_text_depends_on_the_order_in_which_prompts_are_read():
    rng, engine = random.Random(3), small_passes(max_batch_size=5)
    lengths = [rng.choice([1, 2, 9, ROWS, ROWS + 1, 3 * ROWS, 200]) for _ in range(40)]
    prompts = [prompt(rng.randrange(3, 9), length) for length in lengths]  # many share their beginnings
    params = [SamplingParams(max_new_tokens=rng.randint(1, 9), temperature=0.8, seed=i) for i in range(40)]
    requests, scheduler = engine.prepare(prompts, params).requests, Scheduler(engine.core, max_prefill_rows=ROWS)
    for request in requests:
        scheduler.add([request])
        if rng.random() < 0.5:
            scheduler.step()
    while scheduler.has_unfinished_requests:
        scheduler.step()
    alone = small_passes(max_batch_size=1).generate(prompts, params)
    assert [request.output_ids for request in requests] == ids(alone)
    assert engine.cache.pages_in_use == 0
