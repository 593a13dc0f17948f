"""Rules that read distributions get them on the device: trees are drawn between two captured cycles."""

import dataclasses
from itertools import cycle

import pytest

from tests.drafters.trained_files import write_trained
from tests.engine.device.prompts import PROMPTS, SAMPLED, on_the_cpu
from tests.engines import ids

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:drafter")]
OPTIONS = {
    "dflash": "nodes=16,top_k=3",
    "domino": "nodes=16,top_k=3",
    "dspark": "nodes=22,top_k=3",
    "eagle": "levels=2,nodes=12,top_k=3",
    "eagle3": "levels=2,nodes=12,top_k=3",
    "fasteagle": "top_k=3",
    "glide": "length=2",
    "jetspec": "nodes=16,top_k=3",
    "medusa": "nodes=6",
    "mtp": "levels=2,nodes=12,top_k=3",
    "p_eagle": "length=3,nodes=10",
    "pard": "length=3,nodes=10",
}
RULES = ["rejection", "cascade:chow,alpha=0.2", "traversal", "margin:reference"]


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    made = write_trained(tmp_path_factory.mktemp("drafters"))
    trained = {name: f"{made[name]},{options},sample=true" for name, options in OPTIONS.items()}
    return trained | {"draft_model": "draft_model:self,layers=1,tree=3x2,confidence=0.08"}


@pytest.mark.parametrize("name, rule", [*zip([*OPTIONS, "draft_model"], cycle(RULES))])
def test_the_device_draws_and_accepts_what_the_cpu_does(device_engine, specs, name, rule):
    params = dataclasses.replace(SAMPLED, max_new_tokens=5, trace=True)
    least = 2 if name in ("draft_model", "pard") else 1  # no captured cycle of theirs reads a text of one token
    prompts = [prompt for prompt in PROMPTS if len(prompt) >= least]
    expected = on_the_cpu(params, drafter=specs[name], rule=rule, prompts=prompts)
    engine = device_engine(specs[name], max_batch_size=3, rule=rule)
    assert engine.drafter.drafts_in_cycle
    outputs = engine.generate(prompts, params)
    assert ids(outputs) == ids(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [(step.tokens, step.accepted) for step in ours.trace] == [(s.tokens, s.accepted) for s in theirs.trace]
    assert any(len(step.tokens) > 2 for output in outputs for step in output.trace)
