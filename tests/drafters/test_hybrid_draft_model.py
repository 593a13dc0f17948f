"""Hybrids as draft models: their states follow the text, whatever was rejected."""

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.draft_trees.tree import TreeBatch
from specengine.models.checkpoint import RandomCheckpoint
from specengine.models.presets import PRESETS
from specengine.models.transformer import load_transformer
from tests.engines import ids, tiny_model

CPU = torch.device("cpu")
PROMPTS = [[3 + i, 9, 27, 81, 3 + i, 9, 27, 40 + i] for i in range(4)] + [[5 * i % 300 + 3 for i in range(90)]]
FAMILIES = ("tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-next")


def likeliest(model, text, count):
    """The likeliest tokens behind a text, from a cache of its own."""
    cache = model.new_cache()
    batch = cache.batch([cache.allocate(len(text))], [0])
    scores = model.forward(TreeBatch.chains([text], CPU), cache, batch).scores[-1]
    return scores.topk(count).indices.tolist()


def recorded(engine):
    """Lists the texts and the trees of an engine's drafts while it runs."""
    drafts, draft = [], engine.drafter.draft

    def record(requests):
        texts = [list(request.tokens) for request in requests]
        drafted = draft(requests)
        drafts.extend(zip(texts, drafted.trees, strict=True))
        return drafted

    engine.drafter.draft = record
    return drafts


@pytest.mark.parametrize("tree", ["length=3", "tree=2x2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_what_the_model_says_of_the_text_so_far(family, tree):
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    plain = Engine(tiny_model(), drafter="none").generate(PROMPTS, params)
    engine = Engine(tiny_model(), drafter=f"draft-model:random:{family},{tree},adaptive=false", max_batch_size=3)
    drafts = recorded(engine)
    assert ids(engine.generate(PROMPTS, params)) == ids(plain)
    engine.generate([11], params)  # its first pass has one row, the root
    model = load_transformer(RandomCheckpoint(PRESETS[family], source=f"random:{family}"), "float32", CPU)
    width = 1 if tree == "length=3" else 2
    assert len(drafts) > 30
    for text, drafted in drafts[:-12:5] + drafts[-12:]:
        for node, parent in enumerate(drafted.parents):
            children = [token for token, own in zip(drafted.tokens, drafted.parents, strict=True) if own == node]
            path = [] if parent < 0 else [drafted.tokens[node]]
            while parent > 0:
                path.insert(0, drafted.tokens[parent])
                parent = drafted.parents[parent]
            if children:
                assert children == likeliest(model, text + path, width), (text, path)
    cache = engine.drafter.small.cache
    assert cache.pages_in_use == cache.states.in_use == 0


@pytest.mark.parametrize("tree", ["length=3", "tree=2x1x1"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_that_drafts_for_itself_is_accepted_whole(temperature, tree):
    params = SamplingParams(max_new_tokens=21, temperature=temperature, seed=3, ignore_eos=True, logprobs=1)
    spec = f"draft-model:random:tiny-qwen3.5,{tree},noise=1,adaptive=false"
    plain, drafted = (
        Engine("random:tiny-qwen3.5", device="cpu", dtype="float32", drafter=drafter).generate(PROMPTS, params)
        for drafter in ("none", spec)
    )
    assert ids(plain) == ids(drafted)
    assert [output.logprobs for output in plain] == [output.logprobs for output in drafted]
    assert all(output.stats.cycles <= 7 for output in drafted)  # four tokens a cycle, fewer at the end


def test_rules_that_sample_drafts_take_a_hybrid():
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=1, ignore_eos=True)
    engine = Engine(tiny_model(), drafter="draft-model:random:tiny-qwen3.5", rule="rejection", max_batch_size=3)
    assert [len(tokens) for tokens in ids(engine.generate(PROMPTS, params))] == [12] * len(PROMPTS)
