"""Prefix hits where cycles run on the device: the CUDA kernels on the simulator, or on a GPU where there is one."""

import dataclasses

import pytest

from specengine import Engine, SamplingParams
from specengine._C import PAGE_SIZE
from specengine.engine.device import memory_budget as memory_plan
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from tests.engine.prefixes import SPECS

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
SYSTEM = [3 + (7 * i * i + i) % 240 for i in range(PAGE_SIZE + 1)]
FIRST, SECOND = [*SYSTEM, 5, 9], [*SYSTEM, 11, 12, 11, 12, 11]
PARAMS = SamplingParams(max_new_tokens=6, trace=True, logprobs=2)


@pytest.fixture
def make(cuda_backend, folders):
    """Engines of one tiny model on the device; strict: its arithmetic."""
    models = {}

    def engine(name, *, strict=True, rows=None, **options) -> Engine:
        if strict not in models:
            ops = cuda_ops(cuda_backend.device, strict=strict)
            ops = dataclasses.replace(ops, prefill_rows=rows or ops.prefill_rows)
            model = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops)
            models[strict] = dataclasses.replace(model, eos_token_ids=frozenset())
        return Engine(models[strict], drafter=SPECS[name].format(**folders), **options)

    return engine


def said(outputs):
    return [(output.token_ids, output.logprobs, output.trace) for output in outputs]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["fasteagle", "medusa", "glide", "draft-model", "pard2", "p-eagle"])
def test_a_hit_changes_no_token_no_bit_and_no_draft(make, name):
    cold, warm = make(name, prefix_cache_mib=0), make(name)
    warm.generate(FIRST, PARAMS)
    outputs = warm.generate([SECOND, FIRST], PARAMS)
    assert said(outputs) == said(cold.generate([SECOND, FIRST], PARAMS))
    assert [output.stats.prefix_hit_tokens for output in outputs] == 2 * [PAGE_SIZE]
    assert warm.cache.pages_in_use == 0


@pytest.mark.full
@pytest.mark.parametrize("name", ["none", "fasteagle", "glide"])
def test_what_cycles_leave_in_the_cache_has_the_bits_of_a_prefill(make, name):
    """Of engines of one model, which share a pool but none of its pages."""
    generating, reading = make(name), make(name)
    prompt, params = SYSTEM[: PAGE_SIZE - 4], dataclasses.replace(PARAMS, max_new_tokens=8)
    text = [*prompt, *generating.generate(prompt, params).token_ids, 7]
    assert generating.cache is reading.cache and generating.cache.prefixes.cached == 1
    assert not reading.generate(text, params).stats.prefix_hit_tokens
    pages = [engine.cache._known.find(engine.core.sharing, text) for engine in (generating, reading)]
    assert len({*pages[0]} | {*pages[1]}) == 2
    networks = {"fasteagle": lambda drafter: drafter.reader, "glide": lambda drafter: drafter.network}
    pools = [networks[name](engine.drafter).pool for engine in (generating, reading)] if name in networks else []
    target = [each[:, page] for page in pages for each in (generating.cache.k, generating.cache.v)]
    assert (target[0] == target[2]).all() and (target[1] == target[3]).all()
    beside = [each[:, page] for pool, page in zip(pools, pages, strict=False) for each in (pool.k, pool.v)]
    assert not beside or ((beside[0] == beside[2]).all() and (beside[1] == beside[3]).all())


@pytest.mark.full
def test_arithmetic_that_is_not_strict_shares_whole_passes_of_prompts_alone(make):
    engine = make("none", strict=False, rows=PAGE_SIZE)
    short, params = SYSTEM[: PAGE_SIZE - 4], dataclasses.replace(PARAMS, max_new_tokens=8)
    answer = engine.generate(short, params).token_ids
    assert engine.cache.prefixes.cached == 0
    long = [*short, *answer, 5]
    first, second = (engine.generate(long, params) for _ in range(2))
    assert said([first]) == said([second])
    assert (first.stats.prefix_hit_tokens, second.stats.prefix_hit_tokens) == (0, PAGE_SIZE)


@pytest.mark.full
def test_what_a_full_pool_keeps_makes_room(make, monkeypatch):
    monkeypatch.setattr(memory_plan, "SIMULATED_PAGES", 4)
    engine, prompts = make("none"), [[token, *SYSTEM] for token in range(3, 8)]
    params = dataclasses.replace(PARAMS, max_new_tokens=2)
    outputs = [engine.generate(prompt, params) for prompt in [*prompts, prompts[-1], prompts[0]]]
    assert [output.stats.prefix_hit_tokens for output in outputs] == [0, 0, 0, 0, 0, PAGE_SIZE, 0]
    assert said(outputs[:5]) == said(engine.generate(prompts, params))  # who has no room waits
    assert engine.cache.k.shape[1] == 4 and engine.cache.prefixes.evicted > 0 and engine.cache.pages_in_use == 0
