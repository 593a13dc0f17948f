"""Hybrids on the device: speculation says what plain decoding says, and rows have the bits of their paths."""

from dataclasses import replace
from random import Random

import pytest
import torch

from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.ops import cuda_ops, native
from tests.backends import cpu_kernels
from tests.drafters.mtp_files import mtp_state, write_mtp
from tests.engine.device.prompts import LOOKUP
from tests.engine.paths import chain, path_to, random_tree
from tests.engines import GREEDY, SAMPLED, Oracle, ids

FAMILIES = ("tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next")
PARAMS = {"greedy": replace(GREEDY, max_new_tokens=5), "T = 0.8": replace(SAMPLED, max_new_tokens=5, temperature=0.8)}
PROMPTS = [[5, 9, 13, 5, 9], [7], [11, 12, 11, 12], [3, 9, 3]]


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_speculation_says_what_plain_decoding_says(device_engine, name, params):
    engine = device_engine("none", name=name, max_batch_size=4)  # the first one: its pool of states serves the others
    plain = engine.generate(PROMPTS, PARAMS[params])
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    vocab = engine.model.config.vocab_size
    for drafter, batch in (("none", 1), (LOOKUP, 4), (Oracle(answers, vocab, 6), 1), (Oracle(answers, vocab, 6), 4)):
        engine = device_engine(drafter, name=name, max_batch_size=batch)
        outputs = engine.generate(PROMPTS[:batch], PARAMS[params])
        assert ids(outputs) == ids(plain)[:batch]
        assert engine.cache.pages_in_use == engine.cache.states.in_use == 0
    assert max(output.stats.tau for output in outputs) > 1.2  # some branches were accepted, others rejected


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:drafter")  # a random one guesses nothing
@pytest.mark.parametrize("name", FAMILIES)
def test_the_drafter_of_its_own_checkpoint_changes_nothing(device_engine, tmp_path, name):
    engine = device_engine("none", name=name, max_batch_size=2)
    folder = write_mtp(tmp_path / "mtp", mtp_state(engine.model.config, engine.model.config.moe))
    drafting = device_engine(f"mtp:{folder},top_k=2,levels=2,nodes=6,adaptive=false", name=name, max_batch_size=2)
    for params in PARAMS.values():
        assert ids(drafting.generate(PROMPTS[:2], params)) == ids(engine.generate(PROMPTS[:2], params))


def on_device(backend, name):
    checkpoint = RandomCheckpoint(replace(PRESETS[name], dtype=None))
    return load_transformer(checkpoint, "float32", backend.device, cuda_ops(backend.device, strict=True))


def logits_of(target, prompts):
    cache = target.new_cache()
    batch = cache.batch([cache.allocate(len(prompt)) for prompt in prompts], [0] * len(prompts))
    return target.forward(TreeBatch.chains(prompts, target.device), cache, batch).scores.cpu()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_has_the_logits_that_it_has_on_the_cpu(cuda_backend, name):
    found = logits_of(on_device(cuda_backend, name), PROMPTS)
    with cpu_kernels():
        checkpoint = RandomCheckpoint(replace(PRESETS[name], dtype=None))
        expected = logits_of(load_transformer(checkpoint, "float32", torch.device("cpu"), native), PROMPTS)
    assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_node_has_the_logits_of_its_path_from_scratch(cuda_backend, name):
    model, random = on_device(cuda_backend, name), Random(1)
    prompt, tree = [3, 9, 27, 81], random_tree(12, model.config.vocab_size, random)
    cache = model.new_cache()
    pages = cache.allocate(64)
    model.forward(chain(model, prompt), cache, cache.batch([pages], [0]))
    rows = TreeBatch.of([tree], model.device, masked=True)
    found = model.forward(rows, cache, cache.batch([pages], [len(prompt)], final=False)).scores.cpu()
    for node in (11, 7, 0):
        path = [tree.tokens[each] for each in path_to(tree, node)]
        assert torch.equal(found[node], logits_of(model, [[*prompt, *path]])[-1])


def test_a_state_that_is_not_replayed_is_seen(device_engine, monkeypatch):
    """The control of the first test: without compaction the states are those of earlier tokens."""
    plain = device_engine("none", name=FAMILIES[0], max_batch_size=1).generate(PROMPTS[:1], PARAMS["greedy"])
    monkeypatch.setattr("specengine.cache.kv_cache.KVCache.compact_states", lambda *_: None)
    engine = device_engine("none", name=FAMILIES[0], max_batch_size=1)
    assert ids(engine.generate(PROMPTS[:1], PARAMS["greedy"])) != ids(plain)


def test_a_fixed_pool_of_states_makes_requests_wait(device_engine):
    engine = device_engine("none", name=FAMILIES[0], max_batch_size=2)
    states = engine.cache.states
    assert (states.memory.slots, states.requests, states.most_kept) == (4, 2, 2)
    pages = [engine.cache.allocate(8) for _ in range(2)]
    assert not engine.cache.has_room(8)
    with pytest.raises(MemoryError, match="recurrent states: all 4 slots are in use"):
        [engine.cache.allocate(8) for _ in range(3)]
    engine.cache.free(pages[0])
    assert states.memory.slots == 4


def test_heads_too_wide_for_the_kernels_are_refused_before_a_weight_is_read(cuda_backend):
    config = PRESETS["tiny-qwen3.5"]
    wide = replace(config, gated_delta=replace(config.gated_delta, key_head_dim=136))
    with pytest.raises(ValueError, match=r"^device: .* has recurrent states of heads wider than 128, which run on the"):
        load_transformer(RandomCheckpoint(wide), "bfloat16", cuda_backend.device, cuda_ops(cuda_backend.device))
