"""Hybrids in several processes have the bits of one process: layers, recurrent states, prefixes, drafts."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from specengine import Engine, RankFailed, SamplingParams
from specengine._C import PAGE_SIZE
from specengine.cache.state_memory import StateMemory
from specengine.models.checkpoint import open_checkpoint
from specengine.models.presets import PRESETS
from specengine.tensor_parallel.loading import load_model
from specengine.tensor_parallel.parallel_states import ParallelStates
from specengine.tensor_parallel.shards import ShardBounds
from tests.drafters.mtp_files import mtp_state
from tests.engines import Oracle
from tests.models.hybrid_files import FAMILIES, write_hybrid_gguf
from tests.models.quantised.packed_hybrids import FORMATS, write_packed
from tests.models.quantised.packing import gptq
from tests.tensor_parallel.hybrids import load_bare_pair, load_pair, spoken, write_folder

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
PROMPTS = [[5, 9, 13, 5, 9], [7], list(range(3, 80)), [11, 12, 11, 12, 11, 12, 11]]
DRAFTERS = ("none", "prompt_lookup,nodes=12,adaptive=false", "mtp:{folder}/mtp,nodes=12,levels=3,adaptive=false")


def params_of(temperature, **changes):
    return SamplingParams(max_new_tokens=12, temperature=temperature, seed=3, logprobs=2, ignore_eos=True, **changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, written when it is asked for."""
    written = {}

    def folder_of(family):
        if family not in written:
            written[family] = write_folder(tmp_path_factory.mktemp(family), family)
        return written[family]

    return folder_of


@pytest.fixture(scope="module")
def pair(folders):
    """A dense hybrid in one process and in two."""
    return load_pair(folders("qwen3_5"))


def check_same(models, folder, drafters=DRAFTERS, batches=(1, 4), temperatures=(0.0, 0.8)):
    one, several = models
    for temperature in temperatures:
        params = params_of(temperature)
        expected = spoken(Engine(one, drafter="none", max_batch_size=1), PROMPTS, params)
        for drafter in drafters:
            for batch in batches:
                engine = Engine(several, drafter=drafter.format(folder=folder), max_batch_size=batch)
                for _ in range(2):  # the second time, slots and prefixes are used again
                    assert spoken(engine, PROMPTS, params) == expected, (temperature, drafter, batch)
                assert engine.cache.pages_in_use == engine.cache.states.in_use == 0


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_drafter_has_the_bits_of_one_process(folders, family, dtype):
    check_same(load_pair(folders(family), dtype), folders(family))


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_mixtures_that_are_hybrids_have_the_bits_of_one_process(folders, family, dtype):
    check_same(load_pair(folders(family), dtype), folders(family), batches=(4,), temperatures=(0.8,))


def test_a_dense_hybrid_has_the_bits_of_one_process(folders, pair):
    check_same(pair, folders("qwen3_5"), batches=(1,), temperatures=(0.0,))


def oracle(model, params, nodes=12):
    plain = Engine(model, drafter="none").generate(PROMPTS, params)
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    return Oracle(answers, model.config.vocab_size, nodes), [(each.token_ids, each.logprobs) for each in plain]


def test_all_ranks_replay_the_accepted_paths_of_trees(pair, monkeypatch):
    params = params_of(0.8)
    drafter, expected = oracle(pair[0], params)
    engine = Engine(pair[1], drafter=drafter, max_batch_size=4)
    outputs = engine.generate(PROMPTS, params)
    assert [(output.token_ids, output.logprobs) for output in outputs] == expected
    assert max(output.stats.tau for output in outputs) > 1.5
    monkeypatch.setattr(ParallelStates, "replay", StateMemory.replay)  # the control: rank 0 alone replays
    with pytest.raises(RuntimeError, match="StopIteration"):  # the text leaves the one that the drafter knows
        engine.generate(PROMPTS, params)


def hits_of(engine, params):
    shared = [(7 * i) % 90 for i in range(2 * PAGE_SIZE + 20)]
    said = []
    for prompt in ([*shared, 5], [*shared, 6, 7], [*shared[: PAGE_SIZE + 9], 9], [*shared, 5]):
        output = engine.generate(prompt, params)
        said.append((output.token_ids, output.logprobs, output.stats.prefix_hit_tokens))
    return said


def test_prefix_hits_are_those_of_one_process_and_every_rank_has_the_state_behind_them(pair, monkeypatch):
    params = params_of(0.8)
    one, several = (Engine(model, drafter="prompt_lookup,adaptive=false") for model in pair)
    expected = hits_of(one, params)
    assert hits_of(several, params) == expected
    assert expected[1][2] == 2 * PAGE_SIZE
    assert several.cache.states.kept == one.cache.states.kept > 0
    monkeypatch.setattr(ParallelStates, "copy", StateMemory.copy)  # the control: rank 0 alone copies states
    assert hits_of(Engine(pair[1], drafter="none"), params) != expected


def test_the_copies_that_the_prefix_cache_may_keep_are_those_of_one_process(pair):
    one, several = (Engine(model, drafter="none", prefix_cache_mib=1).cache.states for model in pair)
    assert several.most_kept == one.most_kept == 2**20 // one.slot_bytes > 0


def test_a_process_has_its_heads_part_of_weights_pages_and_states(tmp_path):
    even = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "hidden_size": 128, "intermediate_size": 512}
    models = load_pair(write_folder(tmp_path, "qwen3_5", **even))
    engines = [Engine(model, drafter="none") for model in models]
    for engine in engines:
        engine.generate(PROMPTS[:1], params_of(0.0))
    whole, part = (engine.cache for engine in engines)
    assert part.k[:, 0].nbytes == whole.k[:, 0].nbytes // 2 and part.page_bytes == whole.page_bytes
    for name in ("states", "conv"):
        assert getattr(part.states.memory, name)[0].nbytes == getattr(whole.states.memory, name)[0].nbytes // 2
    assert part.states.slot_bytes == whole.states.slot_bytes
    whole, part = (
        sum(weight.data.nbytes for layer in model.target.weights.layers for weight in layer.weights) for model in models
    )
    assert 0.5 <= part / whole < 0.55  # rows are stored in panels


@pytest.mark.full
def test_a_gguf_file_whose_value_heads_are_tiled_has_the_bits_of_one_process(folders, tmp_path):
    path = tmp_path / "model.gguf"
    write_hybrid_gguf(path, open_checkpoint(folders("qwen3_5")))
    assert open_checkpoint(path).config.gated_delta.tiled
    check_same(load_bare_pair(path), None, DRAFTERS[:2], batches=(4,), temperatures=(0.8,))


def act_order(weight):
    """GPTQ with columns in an order of their own, which the inputs of all ranks together must get."""
    return gptq(weight, order=torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(9)))


@pytest.mark.full
@pytest.mark.parametrize("form, pack", [*((form, None) for form in FORMATS), ("gptq", act_order)])
def test_quantised_folders_have_the_bits_of_one_process(tmp_path, form, pack):
    packed, _, _ = write_packed(tmp_path, "qwen3_next", form, pack=pack)
    check_same(load_pair(packed, "auto"), None, DRAFTERS[:2], batches=(4,), temperatures=(0.8,))


@pytest.mark.full
def test_three_processes_have_the_bits_of_one(tmp_path):
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    models = load_pair(write_folder(tmp_path, "qwen3_next", **heads), "int8", size=3)
    assert models[1].target.tensor_parallel == 3
    check_same(models, tmp_path, batches=(4,), temperatures=(0.8,))


@pytest.mark.full
def test_the_network_for_drafts_in_the_target_s_own_folder_is_whole_in_rank_0(tmp_path):
    config = open_checkpoint(write_folder(tmp_path, "qwen3_5_moe")).config
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | mtp_state(config, config.moe), file)
    check_same(load_pair(tmp_path), None, ["mtp,adaptive=false", "auto"], batches=(4,), temperatures=(0.8,))


@pytest.mark.full
def test_a_hybrid_that_drafts_is_whole_in_rank_0(pair):
    check_same(pair, None, ["draft-model:random:tiny-qwen3.5,adaptive=false"])


@pytest.mark.full
def test_engines_of_one_model_have_states_of_their_own(pair):
    params = params_of(0.8)
    expected = spoken(Engine(pair[0], drafter="none"), PROMPTS, params)
    engines = [Engine(pair[1], drafter=drafter, max_batch_size=2) for drafter in DRAFTERS[:2]]
    streams = [[engine.stream(prompt, params) for prompt in PROMPTS] for engine in engines]
    got = [[[] for _ in PROMPTS] for _ in engines]
    open_ = [(stream, got[e][p]) for e, own in enumerate(streams) for p, stream in enumerate(own)]
    while open_:
        for entry in list(open_):
            event = next(entry[0], None)
            if event is None:
                open_.remove(entry)
            else:
                entry[1].extend(event.token_ids)
    assert got == [[tokens for tokens, _ in expected]] * 2


@pytest.mark.full
def test_a_killed_rank_ends_requests_and_leaves_no_state(folders):
    model = load_model(folders("qwen3_5"), device="cpu", tensor_parallel=2)
    engine = Engine(model, drafter="prompt_lookup,adaptive=false")
    stream = engine.stream(PROMPTS[0], dataclasses.replace(params_of(0.8), max_new_tokens=120))
    next(stream)
    for process in model.target._group._ranks._processes:
        process.kill()
    with pytest.raises(RankFailed):
        for _ in stream:
            pass
    with pytest.raises(RankFailed):
        engine.generate(PROMPTS, params_of(0.0))
    with pytest.raises(RankFailed):  # more pages than the cache has
        engine.generate([[3] * 300], params_of(0.0))
    assert engine.cache.pages_in_use == engine.cache.states.in_use == 0


@pytest.mark.quick(1)
def test_a_request_that_starts_sends_nothing(pair):
    engine = Engine(pair[1], drafter="none", max_batch_size=4)
    group, params = pair[1].target._group, params_of(0.0)
    sent, send = [], group._ranks.send
    group._ranks.send = lambda message: sent.append(type(message).__name__) or send(message)
    try:
        owners = [engine.cache.allocate(count * PAGE_SIZE) for count in (1, 3, 9)]
        assert not sent
        for pages in owners:
            engine.cache.free(pages)
        engine.generate(PROMPTS[:1], params)
    finally:
        group._ranks.send = send
    sent = [name for name in sent if name != "DropCaches"]  # of engines of other tests
    assert sent[: sent.index("Forward")] == ["OpenCache", "MoveStates"]


def test_more_processes_than_key_heads_are_refused_by_name(monkeypatch):
    config = PRESETS["tiny-qwen3.5"]
    config = dataclasses.replace(config, gated_delta=dataclasses.replace(config.gated_delta, num_key_heads=1))
    with pytest.raises(ValueError, match="tensor_parallel: 2 processes cannot share 1 key heads of layers of gated"):
        ShardBounds.of(config, 2)
    monkeypatch.setattr("specengine.tensor_parallel.rank_processes.subprocess.Popen", None)  # said before one starts
    with pytest.raises(ValueError, match="tensor_parallel: 3 processes cannot share 2 key/value heads"):
        load_model("random:tiny-qwen3.5", device="cpu", tensor_parallel=3)


def test_every_row_of_every_head_is_in_one_rank():
    for tiled in (False, True):
        config = PRESETS["tiny-qwen3.5"]
        delta = dataclasses.replace(config.gated_delta, num_key_heads=5, num_value_heads=15, tiled=tiled)
        shards = ShardBounds.of(dataclasses.replace(config, gated_delta=delta), 2).delta
        assert shards.heads == (0, 2, 5)
        shapes = delta.matrices(64) | {name.removesuffix(".weight"): shape for name, shape in delta.tensors().items()}
        for name, parts in shards.row_bounds().items():
            rows = sorted(row for bounds in parts for r in (0, 1) for row in range(*bounds[r : r + 2]))
            assert rows == list(range(shapes[name][0])), name
        owner = torch.cat([torch.full((part,), rank) for rank, part in enumerate((6 * 24, 9 * 24))])
        order = shards.column_order()
        of_values = (owner if order is None else owner[order]).view(15, 24)[:, 0].tolist()
        keys = [head % 5 if tiled else head // 3 for head in range(15)]
        assert of_values == [0 if key < 2 else 1 for key in keys]
