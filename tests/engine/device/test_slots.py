"""Joins and leaves on the device: which slots they touch, and what those hold."""

import dataclasses

import pytest

from specengine import Engine, SamplingParams
from specengine.engine.device.slots import DeviceSlots
from specengine.engine.scheduler import Scheduler
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from tests.engine.device.captured import captured_engine, model_on_the_standin
from tests.engine.device.prompts import PROMPTS
from tests.engine.prefixes import SPECS

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
LONG = SamplingParams(max_new_tokens=40)
WITH_STATE = ["fasteagle", "medusa", "glide"]  # EAGLE's is FastEagle's


class Run:
    """A scheduler in whose batch requests join and leave."""

    def __init__(self, engine: Engine, device) -> None:
        self._engine, self._device, self._scheduler = engine, device, Scheduler(engine.core)
        self.requests = []

    def join(self, count: int, params: SamplingParams = LONG) -> int:
        """Lets requests join that have no prompt to prefill; returns the launches of the step."""
        joining = self._engine.prepare([[7 + i] for i in range(count)], params).requests
        self.requests += joining
        self._scheduler.add(joining)
        return self._launches()

    def leave(self, place: int) -> int:
        """Lets the request in a place leave; returns the launches of the step behind it."""
        self._scheduler.finish([self.requests.pop(place)], "cancelled")
        return self._launches()

    def _launches(self) -> int:
        before = self._device.launched
        self._scheduler.step()
        return self._device.launched - before


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", WITH_STATE)
def test_a_join_or_a_leave_costs_the_same_beside_many_requests_as_beside_few(device, folders, name):
    engine = captured_engine(model_on_the_standin(), SPECS[name].format(**folders), max_batch_size=8)
    run = Run(engine, device)
    all_of_them = run.join(5)
    few = run.join(1), run.leave(0)
    run.join(2)
    many = run.join(1), run.leave(0)
    assert few == many
    assert few[0] < all_of_them / 2  # the control: it does count what a request costs


def slots_of(engine: Engine) -> tuple[list[int], list[int]]:
    buffers = engine.core.runner.buffers
    return buffers.limits.active.tolist(), buffers.cache.lengths.tolist()


def test_idle_slots_have_no_prefix(device_engine):
    engine = device_engine(max_batch_size=4)
    requests = engine.prepare(PROMPTS[:3], LONG).requests
    for request in requests:
        request.pages = engine.cache.allocate(128)
    slots = DeviceSlots(engine.core.runner.buffers, engine.drafter)
    assert slots.place(requests, 4) == [0, 1, 2]
    assert slots_of(engine) == ([1, 1, 1, 0], [4, 0, 66, 0])
    assert slots.place([requests[0], requests[2]], 4) == [0, 2]
    assert slots.place([requests[2], requests[1], requests[0]], 4) == [2, 1, 0]
    assert slots.place(requests[2:], 1) == [0]  # a smaller bucket: it moves
    assert slots_of(engine) == ([1, 0, 0, 0], [66, 0, 0, 0])
    assert slots.place([], 0) == []
    assert slots_of(engine) == ([0, 0, 0, 0], [0, 0, 0, 0])


def test_biases_follow_their_requests(device_engine):
    engine = device_engine("none", max_batch_size=3)
    biases = [{3: 1.0}, None, {4: 2.0, 5: 3.0}]
    requests = engine.prepare(PROMPTS[:3], [SamplingParams(logit_bias=bias) for bias in biases]).requests
    params, slots = engine.core.runner.buffers.params, DeviceSlots(engine.core.runner.buffers, engine.drafter)
    slots.place(requests, 3)
    assert params.bias_start.tolist() == [0, 1, 1, 3] and params.bias_tokens[:3].tolist() == [3, 4, 5]
    slots.place(requests[1:], 3)
    assert params.bias_start.tolist() == [0, 0, 0, 2] and params.bias_values[:2].tolist() == [2.0, 3.0]
    slots.place(requests[1:2], 3)
    assert params.bias_start.tolist() == [0, 0, 0, 0]


@pytest.mark.full
@pytest.mark.parametrize("name", WITH_STATE)
def test_who_stays_and_who_moves_goes_on_with_the_same_drafts(cuda_backend, folders, name):
    ops = cuda_ops(cuda_backend.device, strict=True)
    model = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops)
    model = dataclasses.replace(model, eos_token_ids=frozenset())
    engine = Engine(model, drafter=SPECS[name].format(**folders), max_batch_size=2, prefix_cache_mib=0)
    short, own = (SamplingParams(max_new_tokens=count, trace=True) for count in (1, 7))
    _, moves = engine.generate([[7], PROMPTS[0]], [short, own])  # to the bucket of one request
    _, stays, _ = engine.generate([[7], PROMPTS[0], [9]], [short, own, short])  # while another one joins
    alone = engine.generate(PROMPTS[0], own)
    assert (moves.token_ids, moves.trace) == (stays.token_ids, stays.trace) == (alone.token_ids, alone.trace)


@pytest.mark.full
@pytest.mark.parametrize("name", ["lookahead"])
def test_trees_from_the_host_and_choices_find_their_slots(cuda_backend, folders, name):
    """The first of three requests leaves, and the last one takes its slot, before the second one's."""
    ops = cuda_ops(cuda_backend.device, strict=True)
    model = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops)
    model = dataclasses.replace(model, eos_token_ids=frozenset())
    engine = Engine(model, drafter=SPECS[name].format(**folders), max_batch_size=4, prefix_cache_mib=0)
    short, own = (SamplingParams(max_new_tokens=count, trace=True, logprobs=1) for count in (1, 7))
    prompts = [[7], PROMPTS[0], PROMPTS[3]]
    together = engine.generate(prompts, [short, own, own])[1:]
    alone = [engine.generate(prompt, own) for prompt in prompts[1:]]
    assert [(o.token_ids, o.trace, o.logprobs) for o in together] == [(o.token_ids, o.trace, o.logprobs) for o in alone]
