"""EAGLE inside captured cycles: what the host drafts, and the same text."""

import dataclasses

import pytest
import torch

from specengine.models.presets import PRESETS
from tests.drafters.eagle_files import layouts, write_drafter
from tests.drafters.mtp_files import mtp_state, write_mtp
from tests.engine.device.prompts import GREEDY, PROMPTS, SAMPLED, on_the_cpu
from tests.engines import ids

LAYOUTS = layouts()
pytestmark = pytest.mark.filterwarnings("ignore:drafter")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "params, name, options",
    [
        (GREEDY, "official", "top_k=6,levels=3,nodes=20"),
        (SAMPLED, "two layers", "top_k=2,levels=3,nodes=8"),
        (GREEDY, "a norm per feature", "top_k=3,levels=4,beam=1"),
        (SAMPLED, "a norm per feature", "top_k=3,levels=4,beam=1"),
        (GREEDY, "eagle 1", "tree=eagle_25"),
    ],
    ids=lambda value: None if isinstance(value, str) else "sampled" if value.temperature else "greedy",
)
def test_eagle_drafts_on_the_device_what_it_drafts_on_the_host(device_engine, tmp_path, params, name, options):
    drafter, config, state = LAYOUTS[name]
    spec = f"{drafter}:{write_drafter(tmp_path / 'draft', config, state)},adaptive=false,{options}"
    traced = dataclasses.replace(params, max_new_tokens=6, trace=True)
    expected = on_the_cpu(traced, drafter=spec)
    outputs = device_engine(spec, max_batch_size=3).generate(PROMPTS, traced)
    assert ids(outputs) == ids(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [sorted(cycle.tokens) for cycle in ours.trace] == [sorted(cycle.tokens) for cycle in theirs.trace]


@pytest.mark.quick(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_so_does_the_network_of_the_target_s_own_checkpoint(device_engine, tmp_path, params):
    torch.manual_seed(4)
    folder = write_mtp(tmp_path / "mtp", mtp_state(PRESETS["tiny-qwen3"]))
    spec = f"mtp:{folder},top_k=6,levels=3,nodes=20,adaptive=false"
    traced = dataclasses.replace(params, max_new_tokens=6, trace=True)
    expected = on_the_cpu(traced, "tiny-qwen3", drafter=spec)
    outputs = device_engine(spec, name="tiny-qwen3", max_batch_size=3).generate(PROMPTS, traced)
    assert ids(outputs) == ids(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [sorted(cycle.tokens) for cycle in ours.trace] == [sorted(cycle.tokens) for cycle in theirs.trace]


def test_a_sequence_may_reach_the_end_of_the_context(device_engine, tmp_path, monkeypatch):
    """The rows that are expanded need more slots than the tree, and stand at positions past the last one."""
    monkeypatch.setitem(PRESETS, "tiny-short", dataclasses.replace(PRESETS["tiny-llama"], max_position=58))
    drafter, config, state = LAYOUTS["short context"]
    spec = f"{drafter}:{write_drafter(tmp_path / 'draft', config, state)},adaptive=false,top_k=2,levels=6,nodes=2"
    prompt, params = list(range(3, 57)), dataclasses.replace(GREEDY, max_new_tokens=100)
    engine = device_engine(spec, name="tiny-short", max_batch_size=1)
    assert len(engine.drafter.network._rope.cos_sin[0]) >= 58 + 6
    assert ids(engine.generate([prompt], params)) == ids(on_the_cpu(params, "tiny-short", [prompt]))
