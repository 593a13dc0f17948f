"""On the real model: tokens are those of transformers, and speculation changes none of them."""

import dataclasses
import gzip
import json

import pytest
import torch

from specengine import _C, Engine, SamplingParams
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.tensor_parallel.loading import load_model
from tests.data.questions import DATA, QUESTIONS, chats
from tests.selection import wide

pytestmark = pytest.mark.model
REFERENCE = json.loads(gzip.decompress((DATA / "smollm2_reference.json.gz").read_bytes()))
GREEDY = SamplingParams(max_new_tokens=128)
SAMPLED = SamplingParams(max_new_tokens=128, temperature=0.8, top_p=0.95, seed=17)


DTYPES = ("float32", "auto", "int8", "bfloat16")  # auto: the file's own Q4_1 and Q8_0


@pytest.fixture(scope="module", params=wide(DTYPES, 2))
def model(smollm2_path, request):
    return load_model(smollm2_path, device="cpu", dtype=request.param)


@pytest.fixture(scope="module")
def engines(model):
    return {name: Engine(model, drafter=name, max_batch_size=4) for name in ("none", "prompt_lookup")}


in_float32 = pytest.mark.parametrize("model", ["float32"], indirect=True)  # as transformers' record is


@pytest.mark.quick(1)
@pytest.mark.parametrize("run", wide(REFERENCE["runs"], 3), ids=lambda run: run["text"][:24])
@in_float32
def test_greedy_tokens_are_those_recorded_from_transformers(engines, run):
    params = SamplingParams(max_new_tokens=len(run["output_ids"]), ignore_eos=True)
    output = engines["prompt_lookup"].generate(run["prompt_ids"], params)
    for ours, theirs, margin in zip(output.token_ids, run["output_ids"], run["margins"], strict=True):
        if ours != theirs:
            assert margin < 1e-3
            break


@pytest.mark.parametrize("run", wide(REFERENCE["runs"], 3), ids=lambda run: run["text"][:24])
@in_float32
def test_logits_are_those_recorded_from_transformers(model, run):
    cache = model.target.new_cache()
    batch = cache.batch([cache.allocate(len(run["prompt_ids"]))], [0])
    rows = TreeBatch.chains([run["prompt_ids"]], model.target.device)
    logits = model.target.forward(rows, cache, batch).scores[-1]
    expected = torch.tensor(run["logits"])
    error = (logits[:: REFERENCE["logit_stride"]] - expected).abs().max()
    assert error / run["highest_logit"] < 2e-3


def check(engines, params, questions, tokens=128):
    prompts, params = chats(questions), dataclasses.replace(params, max_new_tokens=tokens)
    plain = [engines["none"].generate(prompt, params).token_ids for prompt in prompts]
    alone = [engines["prompt_lookup"].generate(prompt, params) for prompt in prompts]
    together = engines["prompt_lookup"].generate(prompts, params)  # at most four share a cycle
    assert [output.token_ids for output in alone] == plain
    assert [output.token_ids for output in together] == plain
    assert sum(len(ids) for ids in plain) / sum(output.stats.cycles for output in alone) > 1.02


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_changes_no_token(engines, params):
    check(engines, params, QUESTIONS[::8], tokens=32)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_changes_no_token_of_thirty_prompts(engines, params):
    check(engines, params, QUESTIONS)


def test_tree_logits_have_the_bits_of_plain_decoding(model):
    """Rows of a wide tree against the same tokens decoded one by one."""
    target = model.target
    prompt, path = REFERENCE["runs"][0]["prompt_ids"], REFERENCE["runs"][0]["output_ids"][:4]
    tokens, parents = [prompt[-1]], [-1]
    nodes = [0]
    for depth, token in enumerate(path):  # decoys before and after every node of the path
        tokens += [100 + depth, token, 200 + depth]
        parents += [nodes[-1]] * 3
        nodes.append(len(tokens) - 2)
    cache = target.new_cache()
    pages = [cache.allocate(200), cache.allocate(200)]
    for own in pages:
        rows = TreeBatch.chains([prompt[:-1]], target.device)
        target.hidden(rows, cache, cache.batch([own], [0]))
    tree = TreeBatch.of([DraftTree(tokens, parents)], target.device)
    in_tree = target.forward(tree, cache, cache.batch(pages[:1], [len(prompt) - 1])).scores
    for i, token in enumerate([prompt[-1], *path]):
        row = TreeBatch.chains([[token]], target.device)
        alone = target.forward(row, cache, cache.batch(pages[1:], [len(prompt) - 1 + i])).scores
        assert torch.equal(alone[0], in_tree[nodes[i]])


def test_threads_and_instruction_sets_change_no_bit(model):
    """All but the portable set, which has no fused multiply-add."""
    target, prompt = model.target, REFERENCE["runs"][0]["prompt_ids"]
    threads, active = _C.num_threads(), _C.instruction_set()
    rows = TreeBatch.chains([prompt], target.device)

    def scores(count: int, instruction_set: str) -> torch.Tensor:
        _C.set_num_threads(count), _C.set_instruction_set(instruction_set)
        cache = target.new_cache()
        return target.forward(rows, cache, cache.batch([cache.allocate(len(prompt))], [0])).scores

    try:
        expected = scores(2, active)
        for name in [name for name in _C.instruction_sets if name != "portable"] or [active]:
            for count in (1, 2, 3):
                assert torch.equal(scores(count, name), expected), (name, count)
    finally:
        _C.set_num_threads(threads), _C.set_instruction_set(active)


def test_text_ends_before_a_stop_string_even_inside_an_accepted_run(engines):
    prompt = chats(["Repeat exactly: one two three four five. one two three four five. one two three four five."])
    free = engines["none"].generate(prompt, GREEDY)[0]
    words = free.text.split()
    stop = words[len(words) // 2]
    for engine in engines.values():
        output = engine.generate(prompt, SamplingParams(max_new_tokens=128, stop=[stop]))[0]
        assert output.text == free.text[: free.text.index(stop)]
        assert output.finish_reason == "stop"
        assert output.token_ids == free.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) < len(free.token_ids)


@pytest.mark.full
@pytest.mark.quick(1)
def test_text_is_the_decoded_tokens_and_streams_in_whole_characters(engines):
    prompt = chats(["Write five emoji and the word 'naïve' in Japanese."])[0]
    for engine in engines.values():
        events = list(engine.stream(prompt, GREEDY))
        output = engine.generate(prompt, GREEDY)
        assert "".join(event.text for event in events) == output.text == events[-1].output.text
        assert output.text == engine.tokenizer.decode(output.token_ids)
        assert all("\ufffd" not in event.text for event in events[:-1])  # a cut by max_new_tokens may end in one


def test_the_model_says_something_sensible(engines):
    output = engines["prompt_lookup"].generate(chats(["Name the capital of France."]), GREEDY)[0]
    assert "Paris" in output.text and output.finish_reason == "stop"
