"""A request whose rows are not numbers fails alone: the others of its batch say what they say without it."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest
import torch

from specengine import AsyncEngine, Engine, GenerationFailed, SamplingParams
from specengine.engine.scheduler import Scheduler
from specengine.tensor_parallel.loading import load_model
from tests.engine.gated import run, settled
from tests.engine.prefixes import SPECS
from tests.engines import ids, tiny_engine

BAD = 77  # a token whose embedding overflows: every row of a text is NaN from there on
GOOD = [[5, 9, 13, 5, 9], [7], [200] * 40]
BROKEN = [[BAD], [5, 9, BAD, 5, 9], [*range(3, 60), BAD, *range(3, 10)]]
GREEDY = SamplingParams(max_new_tokens=20, logit_bias={BAD: -100.0})
SAMPLED = dataclasses.replace(GREEDY, temperature=0.9, top_p=0.95, seed=4)


def broken_model(bad: float = math.nan):
    model = load_model("random:tiny-llama", device="cpu", dtype="float32")
    embedding = model.target.embedding.data
    assert embedding.data_ptr() != model.target.head.weights[0].data.data_ptr()
    embedding[BAD // embedding.shape[-1], :, BAD % embedding.shape[-1]] = bad
    return model


@pytest.mark.quick(4)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*SPECS])
def test_the_others_of_a_batch_go_on_with_every_drafter(make, name, params):
    engine = make(name, max_batch_size=6)
    expected = ids(tiny_engine("none").generate(GOOD, params))
    requests = engine.prepare([p for pair in zip(GOOD, BROKEN, strict=True) for p in pair], params).requests
    scheduler = Scheduler(engine.core)
    scheduler.add(requests)
    for broken in requests[1::2]:  # one after the other
        scheduler.step()
        if not broken.finish_reason:
            engine.cache.v[:, broken.pages[0]] = torch.nan
    while scheduler.has_unfinished_requests:
        scheduler.step()
    assert [request.output_ids for request in requests[::2]] == expected
    for request in requests[1::2]:
        assert request.finish_reason == "error" and "NaN or infinite scores" in str(request.failure)
    assert ids(engine.generate(GOOD, params)) == expected
    settled(engine)


@pytest.mark.parametrize("rule", ["match", "rejection", "traversal", "typical"])
def test_the_others_of_a_batch_go_on_where_a_prompt_is_broken_and_the_drafter_fails_with_it(rule):
    engine = Engine(broken_model(), drafter="draft-model:self,layers=1,length=3,adaptive=false", rule=rule)
    expected = ids(engine.generate(GOOD, SAMPLED))

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            good = [asyncio.create_task(serving.generate(prompt, SAMPLED)) for prompt in GOOD]
            for task in [asyncio.create_task(serving.generate(prompt, SAMPLED)) for prompt in BROKEN]:
                with pytest.raises(GenerationFailed, match=r"^logits: .* has NaN or infinite scores"):
                    await task
            # Texts of rules that read the drafts depend on them.
            assert ids(await asyncio.gather(*good)) == expected or rule in ("rejection", "traversal")

    run(main())
    settled(engine)
    assert engine.metrics.snapshot().finished == {"length": 6, "error": 3}


def test_a_drafter_that_fails_though_no_request_is_broken_is_an_error(monkeypatch):
    engine = tiny_engine("draft-model:self,layers=1,length=3,adaptive=false")
    monkeypatch.setattr(engine.drafter, "draft", lambda requests: int("x"))
    with pytest.raises(ValueError, match=r"^drafter draft_model: invalid literal"):
        engine.generate(GOOD, GREEDY)
    settled(engine)


def test_a_call_with_a_broken_request_raises_after_the_others_have_ended():
    engine = Engine(broken_model(torch.inf), drafter="none")
    with pytest.raises(GenerationFailed, match="there is no token to draw"):
        engine.generate([*GOOD, BROKEN[0]], GREEDY)
    assert engine.metrics.snapshot().finished == {"length": 3, "error": 1}
