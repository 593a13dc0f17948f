"""SmolLM2 with its layers in the codes of every format: drafters of all kinds change no token and no bit of a logit."""

import re

import pytest
import torch

from specengine import Engine, SamplingParams
from specengine.models.checkpoint import open_checkpoint
from specengine.models.transformer import load_transformer
from specengine.tensor_parallel.loading import LoadedModel, load_tokenizer
from tests.engines import ids
from tests.models.coded_checkpoint import CodedCheckpoint
from tests.ops.coding import CODED

pytestmark = [pytest.mark.model, pytest.mark.slow]  # 271 s beside other work
DRAFTERS = (
    *("auto", "prompt_lookup", "suffix", "lookahead", "eagle3", "fasteagle", "medusa", "glide", "draft-model"),
    *("ouroboros", "combine:prompt_lookup+fasteagle"),
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(smollm2_path):
    base = open_checkpoint(smollm2_path)

    def coding_of(name):
        layer = re.search(r"layers\.(\d+)\.", name)
        return list(CODED.values())[int(layer[1]) % len(CODED)] if layer else None

    target = load_transformer(CodedCheckpoint(base, coding_of), "auto", CPU)
    assert target.formats > set(CODED)
    return LoadedModel(
        "smollm2-135m", "auto", target, load_tokenizer(smollm2_path), frozenset(base.config.eos_token_ids)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_drafter_changes_a_token_or_a_logit(model, temperature):
    questions = ["Name the capital of France.", "Write a short story about a fox.", "List three colours as JSON."]
    prompts = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(max_new_tokens=40, temperature=temperature, seed=5, logprobs=1)
    plain = Engine(model, drafter="none").generate(prompts, params)
    drafted_tokens = 0
    for drafter in DRAFTERS:
        spec = drafter if drafter == "auto" else f"{drafter},adaptive=false"
        outputs = Engine(model, drafter=spec, max_batch_size=3).generate(prompts, params)
        assert ids(outputs) == ids(plain), drafter
        assert [output.logprobs for output in outputs] == [output.logprobs for output in plain], drafter
        drafted_tokens += sum(output.stats.tau > 1 for output in outputs)
    assert drafted_tokens > len(DRAFTERS)
