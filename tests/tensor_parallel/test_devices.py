"""Several devices produce the text of one: the CUDA kernels in every rank, on the simulator or on GPUs."""

import dataclasses
import json

import pytest
import torch

from specengine import Engine, RankFailed
from specengine.draft_trees.tree import TreeBatch
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from tests import engines
from tests.drafters.eagle_files import layouts, write_drafter
from tests.models.files import CONFIG_JSON, random_state, write_folder
from tests.tensor_parallel.kills import check_over, own, ranks
from tests.tensor_parallel.odd import ODD, odd_folder
from tests.tensor_parallel.simulated import simulate_ranks

PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 90)), [11, 12, 11, 12, 11, 12, 11]]
GREEDY, SAMPLED = (dataclasses.replace(params, max_new_tokens=10) for params in (engines.GREEDY, engines.SAMPLED))
LOGGED = dataclasses.replace(engines.SHAPED, max_new_tokens=6, logprobs=2)
LOOKUP = "prompt_lookup,nodes=6,adaptive=false"


@pytest.fixture
def load(cuda_backend, monkeypatch):
    """Loads models whose ranks have devices of their own."""
    device = cuda_backend.device.type
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU alone")
    if device == "cpu":
        simulate_ranks(monkeypatch)

    def load(name, size, strict=True, dtype="float32"):
        ops = cuda_ops(torch.device(device, 0) if device == "cuda" else cuda_backend.device, strict)
        model = load_model(name, device=device, dtype=dtype, tensor_parallel=size, ops=ops)
        return dataclasses.replace(model, eos_token_ids=frozenset())

    return load


def texts(model, drafter=LOOKUP, every=(GREEDY, SAMPLED), prompts=PROMPTS, **options):
    engine = Engine(model, drafter=drafter, **{"max_batch_size": 2} | options)
    outputs = [output for params in every for output in engine.generate(prompts, params)]
    return [(output.token_ids, output.logprobs) for output in outputs]


def four_heads(folder):
    """A model of four key/value heads, and as many parts of all else."""
    write_folder(folder, random_state(dataclasses.replace(ODD, num_heads=8, num_kv_heads=4)))
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    biases = {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | heads | biases))
    return folder


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_strict_devices_have_the_bits_of_one(load, name):
    one, several = (load(f"random:{name}", size) for size in (1, 2))
    assert texts(several, every=(GREEDY, LOGGED)) == texts(one, every=(GREEDY, LOGGED))


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mixtral", "tiny-qwen2-moe", "tiny-gpt-oss"])
def test_strict_mixtures_and_codes_have_the_bits_of_one_device(load, name, dtype):
    one, several = (load(f"random:{name}", size, dtype=dtype) for size in (1, 2))
    assert texts(several, every=(LOGGED,)) == texts(one, every=(LOGGED,))


@pytest.mark.full
def test_uneven_parts_and_biases_have_the_bits_of_one_device(load, tmp_path):
    one, several = (load(odd_folder(tmp_path), size) for size in (1, 3))
    assert texts(several) == texts(one)


@pytest.mark.full
def test_four_devices_have_the_bits_of_one(load, tmp_path):
    one, several = (load(four_heads(tmp_path), size, dtype="bfloat16") for size in (1, 4))
    assert texts(several) == texts(one)


@pytest.mark.full
@pytest.mark.parametrize("drafter", ["none", "eagle3:{},beam=1,top_k=1,levels=3,adaptive=false"])
def test_no_drafter_changes_a_bit(load, drafter, tmp_path):
    _, config, state, *_ = layouts()["official"]
    write_drafter(tmp_path, config, state)
    one, several = (load("random:tiny-llama", size) for size in (1, 2))
    assert texts(several, drafter.format(tmp_path)) == texts(one)


def test_accepted_paths_are_moved_in_every_rank(load):
    one, several = (load("random:tiny-llama", size) for size in (1, 2))
    tree = Engine(several, drafter="draft-model:random:tiny-llama,tree=3x2,adaptive=false", max_batch_size=1)
    output = tree.generate(PROMPTS[0], GREEDY)
    assert [output.token_ids] == [tokens for tokens, _ in texts(one, "none", (GREEDY,), PROMPTS[:1])]
    assert output.stats.tau > 2  # the second drafted token of a path does not lie in its place


@pytest.mark.full
def test_pages_of_an_earlier_prompt_hold_in_every_rank(load):
    story = [*range(3, 200)]
    one, several = (Engine(load("random:tiny-llama", size), drafter="none") for size in (1, 2))
    for prompt in ([*story, 5], [*story, 6, 7], [*story[:130], 9]):
        expected, output = one.generate(prompt, GREEDY), several.generate(prompt, GREEDY)
        assert output.token_ids == expected.token_ids
        assert output.stats.prefix_hit_tokens == expected.stats.prefix_hit_tokens
    assert output.stats.prefix_hit_tokens == 128
    assert several.cache.k.nbytes == one.cache.k.nbytes // 2  # of as many pages


def scores(target):
    """Of 30 rows of one chain."""
    cache = target.new_cache(4)
    place = cache.batch([cache.allocate(40)], [0])
    return target.forward(TreeBatch.chains([[*range(5, 35)]], target.device, masked=True), cache, place).scores


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_sums_over_ranks_are_within_the_rounding_of_another_order(load, tmp_path, size):
    folder = four_heads(tmp_path)
    one, several = (scores(load(folder, ranks, strict=False, dtype="bfloat16").target) for ranks in (1, size))
    error = (several - one).abs().max() / one.abs().max()
    assert 0 < error < 0.02  # of bfloat16's 0.004 per rounding; without a rank's part it is about 1


@pytest.mark.full
def test_the_shared_expert_of_a_mixture_is_summed_too(load):
    one, several = (scores(load("random:tiny-qwen2-moe", ranks, strict=False).target) for ranks in (1, 2))
    error = (several - one).abs().max() / one.abs().max()
    assert 0 < error < 1e-4  # float32


def test_a_device_that_ends_ends_all_with_its_reason(load):
    others = {child.pid for child in ranks()}
    failing = Engine(load("random:tiny-llama", 2), drafter="none")
    events = failing.stream([5, 6], dataclasses.replace(GREEDY, max_new_tokens=60, ignore_eos=True))
    next(events)
    own(others)[-1].kill()
    with pytest.raises(RankFailed, match="was ended by signal 9"):
        for _ in events:
            pass
    check_over(failing, others)


def test_what_devices_cannot_share_is_refused_before_a_process_starts(load, monkeypatch):
    monkeypatch.setattr("specengine.tensor_parallel.rank_processes.subprocess.Popen", None)
    with pytest.raises(ValueError, match=r"^tensor_parallel: expected 1 for .* on a GPU"):
        load("random:tiny-qwen3.5", 2)


def test_too_few_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^tensor_parallel: expected a GPU for each of 2 from cuda:1 on, got 2"):
        load_model("random:tiny-llama", device="cuda", tensor_parallel=2, ops=cuda_ops(torch.device("cpu")))
