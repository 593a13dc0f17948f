"""Hybrids as targets: no drafter, tree, batch, prefix or cancellation changes a token or a bit of a log-probability."""

import dataclasses
import functools
from random import Random

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine._C import PAGE_SIZE
from specengine.draft_trees.tree import TreeLayout
from specengine.engine.prefill import passes
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from specengine.tensor_parallel.loading import LoadedModel
from tests.engine.paths import chain, path_to, random_tree
from tests.engine.prefixes import SPECS
from tests.engines import Oracle, ids

FAMILIES = ("tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next")
# A hybrid's first layers have states too, so another model drafts. MTP has a layer of its target's kind: test_mtp.py.
DRAFTERS = {
    name: spec.replace(":self,layers=1", ":random:tiny-llama")
    for name, spec in SPECS.items()
    if name not in ("none", "mtp")
}
PROMPTS = [[3 + i, 9, 27, 81, 3 + i, 9, 27, 40 + i] for i in range(8)]


@functools.cache
def hybrid(family):
    """The tiny model of a family, with heads that the drafters of these tests fit."""
    config = dataclasses.replace(PRESETS[family], head_dim=PRESETS["tiny-llama"].head_dim, rotary_dim=None)
    target = load_transformer(RandomCheckpoint(config), "float32", torch.device("cpu"))
    return LoadedModel(family, "float32", target, None, frozenset())


@functools.cache
def exact_hybrid(family):
    target = load_transformer(RandomCheckpoint(PRESETS[family]), "float32", torch.device("cpu"))
    return LoadedModel(family, "float32", target, None, frozenset())


def logprobs(outputs):
    return [output.logprobs for output in outputs]


def oracle(model, prompts, params, nodes, seed=0):
    """A drafter that knows what plain decoding says, among random wrong nodes; and what that was."""
    plain = Engine(model, drafter="none", max_batch_size=1).generate(prompts, params)
    answers = [[*output.prompt_token_ids, *output.token_ids] for output in plain]
    return Oracle(answers, model.target.config.vocab_size, nodes, seed), plain


@pytest.mark.quick(6)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_drafter_changes_a_token_or_a_logit_of_a_hybrid(folders, family, name, temperature, batch):
    model = hybrid(family)
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=5, logprobs=2)
    plain = Engine(model, drafter="none", max_batch_size=1).generate(PROMPTS[:batch], params)
    engine = Engine(model, drafter=DRAFTERS[name].format(**folders), max_batch_size=batch)
    for _ in range(2):  # what it has learned by the second time changes nothing
        outputs = engine.generate(PROMPTS[:batch], params)
        assert ids(outputs) == ids(plain)
        assert logprobs(outputs) == logprobs(plain)


@pytest.mark.quick(4)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("nodes", [2, 5, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_trees_with_many_rejected_branches_change_nothing(family, nodes, temperature, batch):
    model, params = exact_hybrid(family), SamplingParams(max_new_tokens=40, temperature=temperature, seed=2, logprobs=1)
    drafter, plain = oracle(model, PROMPTS[:batch], params, nodes)
    outputs = Engine(model, drafter=drafter, max_batch_size=batch).generate(PROMPTS[:batch], params)
    assert ids(outputs) == ids(plain)
    assert logprobs(outputs) == logprobs(plain)
    assert nodes == 2 or max(output.stats.tau for output in outputs) > 1.5  # some branches were accepted


def test_a_state_that_is_not_replayed_is_seen(monkeypatch):
    """The control of the test above: without compaction the states are those of earlier tokens."""
    model, params = exact_hybrid(FAMILIES[0]), SamplingParams(max_new_tokens=40, logprobs=1)
    engine = Engine(model, drafter=oracle(model, PROMPTS[:1], params, 16)[0])
    monkeypatch.setattr("specengine.cache.kv_cache.KVCache.compact_states", lambda *_: None)
    with pytest.raises(RuntimeError, match="StopIteration"):  # the text leaves the one that the drafter knows
        engine.generate(PROMPTS[:1], params)


def check_trees(family, count, seed):
    """Compares logits of random trees with passes over single paths, each from the start of the text."""
    model, random = exact_hybrid(family).target, Random(seed)
    vocab = model.config.vocab_size
    for _ in range(count):
        prompt = [random.randrange(vocab) for _ in range(random.randint(1, 12))]
        tree = random_tree(random.randint(1, 64), vocab, random)
        node = random.randrange(len(tree.tokens))
        path = path_to(tree, node)
        expected = chain_logits(model, [*prompt, *(tree.tokens[each] for each in path)])
        cache = model.new_cache()
        pages = cache.allocate(128)
        model.forward(chain(model, prompt), cache, cache.batch([pages], [0]))
        place = cache.batch([pages], [len(prompt)], final=False)
        found = model.forward(TreeLayout(model.device).of([tree]), cache, place).scores
        assert torch.equal(found[node], expected[-1])


def chain_logits(model, tokens):
    cache = model.new_cache()
    return model.forward(chain(model, tokens), cache, cache.batch([cache.allocate(128)], [0])).scores


@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_has_the_logits_of_its_path_from_scratch(family):
    check_trees(family, 25, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_random_trees_have_the_logits_of_their_paths(family):
    check_trees(family, 1000, seed=2)


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup,nodes=12,adaptive=false"])
def test_a_prefix_hit_changes_nothing(drafter):
    model, params = exact_hybrid(FAMILIES[0]), SamplingParams(max_new_tokens=24, logprobs=1)
    shared = [(7 * i) % 90 for i in range(300)]
    prompts = [[*shared, 5, 6, i] for i in range(4)]
    bare = Engine(model, drafter="none", prefix_cache_mib=0)
    expected = [bare.generate([prompt], params)[0] for prompt in prompts]
    engine = Engine(model, drafter=drafter)
    outputs = [engine.generate([prompt], params)[0] for prompt in prompts]
    assert ids(outputs) == ids(expected)
    assert logprobs(outputs) == logprobs(expected)
    assert engine.cache.prefixes.hit == 3 * 256


@pytest.mark.parametrize("tokens", [2 * PAGE_SIZE, 2 * PAGE_SIZE + 1, 2 * PAGE_SIZE + 2])
def test_a_prompt_that_is_asked_again_is_found_whatever_its_length(tokens):
    engine, params = Engine(exact_hybrid(FAMILIES[0])), SamplingParams(max_new_tokens=4, logprobs=1)
    prompt = [(7 * i) % 90 for i in range(tokens)]
    first, again = (engine.generate([prompt], params)[0] for _ in range(2))
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    assert engine.cache.prefixes.hit == (2 if tokens > 2 * PAGE_SIZE + 1 else 1) * PAGE_SIZE


def test_passes_of_a_prompt_end_where_a_state_can_be_found_and_divide_nothing_that_is_shared_whole():
    page, step = PAGE_SIZE, 4 * PAGE_SIZE
    assert [*passes(0, 6 * page, step, page)] == [(0, 4 * page), (4 * page, 5 * page), (5 * page, 6 * page)]
    assert [*passes(0, 8 * page, step, step)] == [(0, step), (step, 8 * page)]
    assert [*passes(step, 8 * page + 1, step, step)] == [(step, 8 * page), (8 * page, 8 * page + 1)]
    assert [*passes(0, 6 * page, step, 0)] == [(0, step), (step, 6 * page)]


def test_a_cancelled_request_leaves_no_state_and_its_text_can_be_resumed():
    model, params = exact_hybrid(FAMILIES[1]), SamplingParams(max_new_tokens=40)
    drafter, plain = oracle(model, PROMPTS[:1], params, 12)
    engine = Engine(model, drafter=drafter)
    states, got = engine.cache.states, []
    stream = engine.stream(PROMPTS[0], params)
    for event in stream:
        got += event.token_ids
        if len(got) > 9:
            break
    stream.close()
    assert engine.cache.pages_in_use == states.in_use == 0
    rest = engine.generate([[*PROMPTS[0], *got]], SamplingParams(max_new_tokens=40 - len(got)))[0]
    assert [*got, *rest.token_ids] == plain[0].token_ids


def test_states_do_not_leak():
    model, random = exact_hybrid(FAMILIES[0]), Random(3)
    params = SamplingParams(max_new_tokens=24)
    drafter, _ = oracle(model, PROMPTS, params, 12)
    engine = Engine(model, drafter=drafter, max_batch_size=4)
    for _ in range(12):
        stream = engine.stream(random.choice(PROMPTS), params)
        for _, _ in zip(stream, range(random.randint(1, 20)), strict=False):
            pass
        stream.close()
        engine.generate(random.sample(PROMPTS, 5), params)
    states = engine.cache.states
    assert engine.cache.pages_in_use == states.in_use == 0
    assert states.slots_with_memory <= 4  # the requests of a batch


def test_what_needs_a_state_to_go_back_is_refused_by_name():
    model = exact_hybrid(FAMILIES[0])
    for spec, message in (
        ("draft-model:self,layers=1", "layers: a hybrid model cannot draft with its first layers"),
        ("ouroboros:random:tiny-qwen3.5", "drafter: random:tiny-qwen3.5 is a hybrid model, whose states ouroboros"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, drafter=spec)
