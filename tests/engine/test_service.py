"""What a service does to an engine: abandons streams, calls from many threads, shares a model, pauses."""

import dataclasses
import gc
import threading

import pytest

from specengine import _C, Engine, SamplingParams, api, generate
from specengine.cache import kv_cache as cache_module
from specengine.ops import native
from specengine.tensor_parallel.loading import load_model
from tests.engines import SAMPLED, ids, tiny_engine, tiny_model
from tests.threads import at_once

PARAMS = SamplingParams(max_new_tokens=40)


class Holder:
    """A reference cycle that keeps a stream until the garbage collector finds it."""

    def __init__(self, stream) -> None:
        self.stream, self.self = stream, self


def test_a_stream_collected_in_the_middle_of_a_cycle_blocks_nothing():
    engine = tiny_engine()
    expected = engine.generate([5, 6, 7], PARAMS).token_ids
    thresholds, done = gc.get_threshold(), threading.Event()

    def work() -> None:
        for _ in range(20):
            stream = engine.stream([3, 4, 5], PARAMS)
            next(stream)
            Holder(stream)
            del stream
            assert engine.generate([5, 6, 7], PARAMS).token_ids == expected
        done.set()

    gc.set_threshold(20, 2, 2)
    try:
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(60), "the engine hangs"
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert engine.cache.pages_in_use == 0


def test_a_call_is_not_kept_waiting_by_another_ones_many_prompts():
    engine, order = tiny_engine("none", max_batch_size=8), []
    stream = engine.stream([3, 4, 5], SamplingParams(max_new_tokens=200))
    next(stream)
    long = [[3 + (i + j) % 200 for i in range(400)] for j in range(8)]
    original = engine.model.target.hidden_states

    def hidden_states(tree, *args):  # forward calls it too, with one row per request
        if len(tree.tokens) > 8:
            order.append("prefill")
        return original(tree, *args)

    engine.model = dataclasses.replace(engine.model)
    engine.model.target.hidden_states = hidden_states
    try:
        thread = threading.Thread(target=engine.generate, args=(long, SamplingParams(max_new_tokens=1)))
        thread.start()
        for _ in stream:
            order.append("cycle")
        thread.join()
    finally:
        del engine.model.target.hidden_states
    first, last = order.index("prefill"), len(order) - 1 - order[::-1].index("prefill")
    during = order[first : last + 1]
    assert during.count("prefill") == 8 * -(-399 // native.prefill_rows)
    assert during.count("cycle") >= 8  # with one turn for all prompts it was none


def test_engines_that_share_a_model_may_grow_its_rotary_tables_at_once():
    model = load_model("random:tiny-llama", device="cpu")
    engines = [Engine(model, drafter="none") for _ in range(4)]
    prompt, failures = [3, 4, 5], []

    def work(engine: Engine, length: int) -> None:
        try:
            engine.generate(prompt * length, SamplingParams(max_new_tokens=4))
        except ValueError as error:
            failures.append(error)

    for round_ in range(10):
        rope = model.target._rope
        rope.cos_sin = tuple(table[:16] for table in rope.cos_sin)
        threads = [threading.Thread(target=work, args=(e, 20 * (i + 1) + round_)) for i, e in enumerate(engines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_engines_that_share_a_model_say_at_once_what_they_say_alone():
    prompts = [[5, 9, 13, 5, 9], [200] * 9]
    drafters = ["suffix", "lookahead", "ouroboros:self,layers=1", "draft-model:self,layers=1"]
    before = _C.num_threads()
    expected = [tiny_engine("none").generate(prompts, params) for params in (PARAMS, SAMPLED)]

    def work(caller: int) -> None:
        _C.set_num_threads(1 + caller)
        engine = tiny_engine(f"{drafters[caller]},adaptive=false", max_batch_size=2)
        for params, outputs in zip((PARAMS, SAMPLED), expected, strict=True):
            assert ids(engine.generate(prompts, params)) == ids(outputs)

    try:
        at_once(work, len(drafters))
    finally:
        _C.set_num_threads(before)


def test_a_large_cache_is_let_go_when_nobody_uses_it(monkeypatch):
    monkeypatch.setattr(cache_module, "IDLE_BYTES", 1 << 20)
    engine = tiny_engine(prefix_cache_mib=0)
    most = (1 << 20) // engine.cache._bytes_of_page
    for _ in engine.stream([3] * 300, PARAMS):
        assert 0 < engine.metrics.snapshot().pages_total <= most
    engine.generate([[3 + i] * 300 for i in range(16)], PARAMS)
    assert engine.metrics.snapshot().pages_total == most
    output = engine.generate([5, 6, 7], PARAMS)
    assert output.token_ids == tiny_engine("none").generate([5, 6, 7], PARAMS).token_ids


def test_generate_keeps_a_bounded_number_of_engines():
    for nodes in range(2, 2 + api.MAX_ENGINES + 3):
        generate([3, 4], model="random:tiny-llama", drafter=f"prompt_lookup,nodes={nodes}", max_new_tokens=2)
    assert len(api._engines) == api.MAX_ENGINES


@pytest.mark.parametrize(("name", "value"), [("dtype", "bfloat16"), ("dtype", "garbage"), ("device", "cuda")])
def test_a_loaded_model_cannot_be_moved_by_an_engine(name, value):
    with pytest.raises(ValueError, match=f"{name}: this model was loaded with"):
        Engine(tiny_model(), **{name: value})
    Engine(tiny_model(), dtype="float32", device="cpu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.generate([3], 5), "params: expected one SamplingParams"),
        (lambda e: e.stream([3], "x"), "params: expected one SamplingParams"),
        (lambda e: e.generate(b"bytes"), "prompts: expected a string"),
        (lambda e: e.generate(["\udcff"]), "prompt: is not valid UTF-8 text at character 0"),
        (lambda e: Engine(None), "model: expected a name or a path"),
        (lambda e: Engine("random:tiny-llama", dtype=[]), "dtype: expected auto"),
        (lambda e: Engine("random:nothing"), "model: unknown preset"),
        (lambda e: generate([3], model=None), "model: expected a name or a path"),
        (lambda e: generate([3], drafter=7), "drafter: expected a string"),
        (lambda e: Engine("random:tiny-llama", drafter="prompt_lookup,nodes=1"), "drafter: prompt_lookup: nodes"),
    ],
)
def test_wrong_types_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(tiny_engine())
