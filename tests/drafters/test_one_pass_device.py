"""PARD and P-EAGLE inside captured cycles: the CUDA kernels on the simulator, or on a GPU where there is one."""

import dataclasses

import pytest

from specengine import Engine
from specengine.drafters import load_drafter
from specengine.ops import cuda_ops
from specengine.rules.base import Wants
from specengine.tensor_parallel.loading import load_model
from tests.backends import cpu_kernels
from tests.drafters.p_eagle_files import write_p_eagle
from tests.drafters.pard_files import warp_state, write_pard
from tests.engine.device.prompts import GREEDY, PROMPTS, SAMPLED
from tests.engines import ids

pytestmark = pytest.mark.filterwarnings("ignore:drafter")  # random ones guess nothing
WRITTEN = {"pard": write_pard, "p-eagle": write_p_eagle}
TREES = {
    "chain": ("tree=chain,length=3", 4),
    "ddtree": ("length=3,nodes=6", 6),
    "jetspec": ("tree=jetspec,length=3,top_k=2,nodes=6", 6),
}


@pytest.fixture
def tiny_target(cuda_backend):
    """A tiny float32 model on the CPU, and the same on the device."""
    ops = cuda_ops(cuda_backend.device, strict=True)
    with cpu_kernels():
        model = load_model("random:tiny-llama", device="cpu", dtype="float32")
    return model, load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops)


def spec_of(folder, name):
    return f"{name}:{WRITTEN[name](folder / name)}"


@pytest.mark.quick(2)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options, nodes", TREES.values(), ids=TREES)
@pytest.mark.parametrize("name", WRITTEN)
def test_the_device_says_and_drafts_what_the_cpu_does(tiny_target, name, options, nodes, params, tmp_path):
    model, on_device = tiny_target
    spec, traced = f"{spec_of(tmp_path, name)},{options},adaptive=false", dataclasses.replace(params, trace=True)
    with cpu_kernels():
        expected = Engine(model, drafter=spec, max_batch_size=2).generate(PROMPTS, traced)
    engine = Engine(on_device, drafter=spec, max_batch_size=2)
    assert all(engine.drafter.drafts_in_cycle for wants in Wants)
    outputs = engine.generate(PROMPTS, traced)
    assert ids(outputs) == ids(expected)
    drafted = 0
    for prompt, ours, theirs in zip(PROMPTS, outputs, expected, strict=True):
        if len(prompt) > 1:  # a text of one token is not read yet
            drafts = [(cycle.tokens, cycle.accepted) for cycle in ours.trace]
            assert drafts == [(cycle.tokens, cycle.accepted) for cycle in theirs.trace]
            drafted += sum(len(cycle.tokens) == nodes for cycle in ours.trace)
    assert drafted > 8


@pytest.mark.parametrize("name", WRITTEN)
def test_a_draft_reads_what_plain_cycles_left(tiny_target, monkeypatch, tmp_path, name):
    """Random drafts are refused, so that cycle i drafts behind the same text whatever the cycles before it did."""
    spec, greedy = f"{spec_of(tmp_path, name)},tree=chain,length=3", dataclasses.replace(GREEDY, trace=True)
    greedy, texts = dataclasses.replace(greedy, max_new_tokens=9), []
    for plain in (0, 6):  # more than a draft reads without a catch-up
        engine, widths = Engine(tiny_target[1], drafter=spec, max_batch_size=1), []

        def choose(_, size, plain=plain, widths=widths):
            widths.append(1 if len(widths) < plain else 4)
            return widths[-1]

        monkeypatch.setattr(type(engine.core.runner.graphs), "choose", choose)
        texts.append([cycle.tokens for cycle in engine.generate(PROMPTS[0], greedy).trace])
    assert len(texts[0]) == len(texts[1]) == 9
    assert texts[1][6:] == texts[0][6:] and len(texts[0][6]) == 3  # no more than the request may commit
    assert all(len(tokens) == 1 for tokens in texts[1][:6])


def test_features_are_read_between_the_cycles(tiny_target, tmp_path):
    folder = write_pard(tmp_path / "pard", warp_state(tiny_target[0].config.hidden_size))
    engine = Engine(tiny_target[1], drafter=f"pard:{folder}")
    assert not any(engine.drafter.drafts_in_cycle for wants in Wants)


LENGTH = "length: expected an integer from 1 to 127, got 128"
CHILDREN = "nodes: 20 levels of 255 children, at most 3840 together are supported on cuda"
LARGE = {
    ("pard", "length=128,tree=chain"): LENGTH,
    ("p-eagle", "length=128,tree=chain"): LENGTH,
    ("pard", "length=20,nodes=256"): CHILDREN,
}


@pytest.mark.parametrize("case, message", LARGE.items())
def test_a_draft_that_no_cycle_has_room_for_is_refused(tiny_target, tmp_path, case, message):
    name, options = case
    with pytest.raises(ValueError, match=f"^drafter: {message}"):
        load_drafter(f"{spec_of(tmp_path, name)},{options}", tiny_target[1].target)
