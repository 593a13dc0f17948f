"""FastEagle inside captured cycles: what the host drafts in one call of the core, and the same text."""

import dataclasses

import pytest

from tests.drafters.fasteagle_files import random_fasteagle
from tests.engine.device.prompts import GREEDY, PROMPTS, SAMPLED, on_the_cpu
from tests.engines import ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "params, options",
    [
        (GREEDY, {"entry": "concat", "markov": 8, "own_head": True, "output_norm": True}),
        (SAMPLED, {"markov": 16}),
    ],
    ids=["everything", "markov"],
)
def test_fasteagle_drafts_on_the_device_what_it_drafts_on_the_host(device_engine, tmp_path, params, options):
    spec = f"fasteagle:{random_fasteagle(tmp_path, **options)[0]},adaptive=false,top_k=3"
    traced = dataclasses.replace(params, max_new_tokens=6, trace=True)
    expected = on_the_cpu(traced, drafter=spec)
    outputs = device_engine(spec, max_batch_size=3).generate(PROMPTS, traced)
    assert ids(outputs) == ids(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [sorted(cycle.tokens) for cycle in ours.trace] == [sorted(cycle.tokens) for cycle in theirs.trace]
