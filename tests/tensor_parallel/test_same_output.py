"""Several processes produce the text of one process, bit for bit, with every drafter."""

import asyncio
import dataclasses
import gc
import weakref

import psutil
import pytest

from specengine import _C, AsyncEngine, Engine, RankFailed, SamplingParams
from specengine.tensor_parallel.loading import load_model
from tests import engines
from tests.constraints.vocabulary import CONSTRAINTS, ENDS, TOKENIZER
from tests.drafters.eagle_files import layouts, write_drafter
from tests.drafters.shared_layers import write_layers
from tests.engines import ids
from tests.tensor_parallel.kills import check_over, own, ranks
from tests.tensor_parallel.odd import odd_folder

PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 150)), [11, 12, 11, 12, 11, 12, 11]]
GREEDY, SAMPLED = (dataclasses.replace(params, max_new_tokens=20) for params in (engines.GREEDY, engines.SAMPLED))
ALL = (GREEDY, SAMPLED, dataclasses.replace(engines.SHAPED, max_new_tokens=20, logprobs=3))


@pytest.fixture(scope="module")
def pair():
    """One model in one process and in two."""
    return [load_model("random:tiny-llama", device="cpu", tensor_parallel=size) for size in (1, 2)]


def texts(model, drafter="none", every=ALL, prompts=PROMPTS, **options):
    engine = Engine(model, drafter=drafter, **options)
    outputs = [output for params in every for output in engine.generate(prompts, params)]
    return [(output.token_ids, output.logprobs) for output in outputs]


def same(models, drafter, **options):
    one, several = models
    spoken = texts(several, drafter, **options)
    assert spoken == texts(one)
    return spoken


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["tiny-llama3", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_every_family_has_the_bits_of_one_process(name):
    models = [load_model(f"random:{name}", device="cpu", tensor_parallel=size) for size in (1, 2)]
    same(models, "prompt_lookup,nodes=12,adaptive=false")


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("name", ["tiny-qwen2-moe", "tiny-mixtral", "tiny-qwen3-moe", "tiny-gpt-oss"])
def test_mixtures_of_experts_have_the_bits_of_one_process(name, dtype):
    models = [load_model(f"random:{name}", device="cpu", dtype=dtype, tensor_parallel=size) for size in (1, 2)]
    same(models, "prompt_lookup,nodes=12,adaptive=false")


@pytest.mark.full
def test_uneven_parts_and_biases_have_the_bits_of_one_process_and_one_rank_of_three_ends_all(tmp_path):
    odd, others = odd_folder(tmp_path), {child.pid for child in ranks()}
    models = [load_model(odd, device="cpu", dtype="int8", tensor_parallel=size) for size in (1, 3)]
    same(models, "prompt_lookup,adaptive=false")
    failing, last = Engine(models[1], drafter="none"), own(others)[-1]
    events = failing.stream([5, 6], dataclasses.replace(GREEDY, max_new_tokens=300, ignore_eos=True))
    next(events)
    last.kill()
    with pytest.raises(RankFailed, match=rf"process {last.pid}\) was ended by signal 9"):
        for _ in events:
            pass
    check_over(failing, others)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "drafter, batch",
    [
        ("none", 1),
        ("none", 4),
        ("prompt_lookup", 3),
        ("suffix,adaptive=false", 3),
        ("lookahead,adaptive=false", 4),
        ("draft-model", 2),
    ],
)
def test_no_drafter_changes_a_bit(pair, drafter, batch):
    spec = "draft-model:random:tiny-llama,adaptive=false" if drafter == "draft-model" else drafter
    same(pair, spec, max_batch_size=batch)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", ["official", "a norm per feature"])
def test_a_drafter_that_reads_hidden_states_changes_no_bit(pair, case, tmp_path):
    name, config, state, *_ = layouts()[case]
    write_drafter(tmp_path, config, state)
    same(pair, f"{name}:{tmp_path},adaptive=false", max_batch_size=3)


def test_a_drafter_between_the_target_s_embedding_and_head_changes_no_bit(pair, tmp_path):
    folder = write_layers(tmp_path / "layers", pair[0], [0, 1])
    same(pair, f"draft-model:{folder},adaptive=false")


def test_a_rule_that_reads_the_drafter_s_distribution_changes_no_bit(pair):
    drafter, every = "draft-model:random:tiny-qwen2,adaptive=false", (SAMPLED,)
    one, several = (texts(model, drafter, every, rule="rejection") for model in pair)
    assert (
        several == one != texts(pair[0], every=every)
    )  # another text than plain decoding's: the drafter had an influence


def test_the_right_draft_is_accepted(pair):
    output = Engine(pair[1], drafter="draft-model:random:tiny-llama,length=4,adaptive=false").generate(
        [7, 8, 9], GREEDY
    )
    assert output.stats.tau > 4  # all ranks write, cache and compact trees alike


@pytest.mark.parametrize("drafter", ["prompt_lookup,adaptive=false", "draft-model:random:tiny-llama"])
def test_cached_prefixes_change_no_bit(pair, drafter):
    story = [*range(3, 200)]
    prompts = [[*story, 5], [*story, 6, 7], [*story[:130], 9]]
    one, several = (Engine(model, drafter=drafter) for model in pair)
    for prompt in prompts:
        expected, output = one.generate(prompt, SAMPLED), several.generate(prompt, SAMPLED)
        assert output.token_ids == expected.token_ids
        assert output.stats.prefix_hit_tokens == expected.stats.prefix_hit_tokens
    assert output.stats.prefix_hit_tokens == 128
    assert (
        several.cache.page_bytes == one.cache.page_bytes
        and several.cache.k[:, 0].nbytes == one.cache.k[:, 0].nbytes // 2
    )


def test_a_cache_that_gives_memory_back_changes_no_bit(pair, monkeypatch):
    monkeypatch.setattr("specengine.cache.kv_cache.IDLE_BYTES", 1)
    one, several = (Engine(model, drafter="none") for model in pair)
    several.cache.kept_bytes = 2 * several.cache.page_bytes
    long = [[start, *range(3, 300)] for start in range(6)]
    pages, hits = [], []
    for prompts in (long, [[5, 6]], [[5, 6]], long):
        outputs = several.generate(prompts, GREEDY)
        assert ids(outputs) == ids(one.generate(prompts, GREEDY))
        pages.append(several.cache.pages_with_memory)
        hits.append(sum(output.stats.prefix_hit_tokens for output in outputs))
    assert pages == [2] * 4 and hits == [0, 0, 0, 128]


def test_async_requests_get_the_same_text(pair):
    expected = ids(Engine(pair[0], drafter="none").generate(PROMPTS, SAMPLED))

    async def main():
        async with AsyncEngine(Engine(pair[1], drafter="prompt_lookup,adaptive=false", max_batch_size=3)) as serving:
            return await asyncio.gather(*(serving.generate(prompt, SAMPLED) for prompt in PROMPTS))

    assert ids(asyncio.run(main())) == expected


@pytest.mark.full
def test_engines_share_the_processes_of_a_model_and_the_last_one_ends_them():
    threads, before = _C.num_threads(), {child.pid for child in psutil.Process().children()}
    model = load_model("random:tiny-llama", device="cpu", tensor_parallel=2)
    engines = [Engine(model, drafter="none") for _ in range(2)]
    (process,) = [child for child in psutil.Process().children() if child.pid not in before]
    assert _C.num_threads() == max(1, threads // 2)
    assert (
        ids([engine.generate([5, 6], GREEDY) for engine in engines])
        == [engines[0].generate([5, 6], GREEDY).token_ids] * 2
    )
    assert all(engine.healthy for engine in engines)
    alive = weakref.ref(model.target)
    del model, engines[0]
    gc.collect()
    assert process.is_running() and alive() is not None
    engines.clear()
    gc.collect()
    assert alive() is None and not process.is_running() and _C.num_threads() == threads


@pytest.mark.parametrize(
    "drafter, why", [("draft-model:self,layers=1", "layers of its own"), ("glide:x", "glide reads")]
)
def test_drafters_that_need_the_whole_target_are_refused(pair, drafter, why):
    with pytest.raises(ValueError, match=f"^drafter: .*{why}"):
        Engine(pair[1], drafter=drafter)


CHATS = [[{"role": "user", "content": text}] for text in ("Name three colours.", "Write a line about the sea.")]


def check_real(path, dtype, size, tokens, drafters=("none", "auto,adaptive=false")):
    models = [load_model(path, device="cpu", dtype=dtype, tensor_parallel=n) for n in (1, size)]
    for params in (
        SamplingParams(max_new_tokens=tokens),
        SamplingParams(max_new_tokens=tokens, temperature=0.8, seed=3),
    ):
        plain = ids(Engine(models[0], drafter="none").generate(CHATS, params))
        for drafter in drafters:
            assert ids(Engine(models[1], drafter=drafter).generate(CHATS, params)) == plain


@pytest.mark.full
@pytest.mark.model
def test_the_real_model_gives_the_same_text(smollm2_path):
    check_real(smollm2_path, "auto", size=2, tokens=8, drafters=["auto,adaptive=false"])  # 3 key/value heads: 1 and 2


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "int8", "int4"])
def test_the_real_model_gives_the_same_text_in_every_dtype(smollm2_path, dtype, size):
    check_real(smollm2_path, dtype, size, tokens=64)


@pytest.mark.full
def test_constrained_texts_are_those_of_one_process(pair):
    models = [dataclasses.replace(model, tokenizer=TOKENIZER, eos_token_ids=ENDS) for model in pair]
    params = [SamplingParams(max_new_tokens=60, temperature=0.8, **given) for given in CONSTRAINTS]
    for drafter in ("none", "prompt_lookup,adaptive=false"):
        one, several = (Engine(model, drafter=drafter).generate(PROMPTS, params) for model in models)
        assert ids(one) == ids(several)
        assert [output.finish_reason for output in several] == ["stop"] * len(params)
