"""A draft model inside captured cycles: the CUDA kernels on the simulator, or on a GPU where there is one."""

import dataclasses
import json

import pytest
import torch

from specengine import Engine
from specengine._C import PAGE_SIZE
from specengine.drafters.text_state import TextState
from specengine.models import presets
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from tests.engine.device.prompts import GREEDY, PROMPTS, SAMPLED, on_the_cpu
from tests.engines import ids
from tests.models.files import CONFIG_JSON, random_state, write_folder

WHOLE = "draft_model:self,layers=2,length=3,adaptive=false"  # the target itself: all its drafts are right
PART = "draft_model:self,layers=1,length=3,adaptive=false"


@pytest.fixture
def on_device(cuda_backend):
    """Makes engines of the tiny target on the device."""
    ops = cuda_ops(cuda_backend.device, strict=True)

    def make(drafter, name="tiny-llama", **options):
        model = load_model(f"random:{name}", device=cuda_backend.device.type, dtype="float32", ops=ops)
        return Engine(dataclasses.replace(model, eos_token_ids=frozenset()), drafter=drafter, **options)

    return make


def lengths_of(output):
    return [len(cycle.accepted) for cycle in output.trace]


SHAPES = {
    "chain": PART,
    "tree": PART.replace("length=3", "tree=2x1x2"),
    "confidence": PART + ",confidence=0.08",
    "tree and confidence": PART.replace("length=3", "tree=2x1x2") + ",confidence=0.08",
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_device_says_and_drafts_what_the_cpu_does(on_device, shape, params):
    engine = on_device(SHAPES[shape], max_batch_size=2)
    assert engine.drafter.drafts_in_cycle
    traced = dataclasses.replace(params, trace=True)
    outputs = engine.generate(PROMPTS, traced)
    expected = on_the_cpu(traced, drafter=SHAPES[shape] + ",noise=0")
    assert ids(outputs) == ids(expected)
    sizes = [len(cycle.tokens) for output in outputs for cycle in output.trace]
    assert max(sizes) == engine.drafter.max_nodes or "confidence" in shape
    first = [len(cycle.tokens) for output in outputs for cycle in output.trace[:2]]  # no limit cuts these
    assert ("confidence" in shape) == any(1 < size < engine.drafter.max_nodes for size in first)
    assert engine.drafter.small.cache.pages_in_use == 0
    for ours, theirs in zip(outputs, expected, strict=True):
        if len(ours.prompt_token_ids) > 1:  # a text of one token is not read yet
            assert [(sorted(c.tokens), c.accepted) for c in ours.trace] == [
                (sorted(c.tokens), c.accepted) for c in theirs.trace
            ]


@pytest.mark.parametrize("length", [1, 2])
def test_confidence_ends_the_first_level_too(on_device, length):
    spec = f"draft_model:self,layers=1,length={length},confidence=0.999,adaptive=false"
    (output,) = on_device(spec, max_batch_size=1).generate(PROMPTS[:1], dataclasses.replace(GREEDY, trace=True))
    assert {len(cycle.tokens) for cycle in output.trace} == {1}


def test_drafts_of_the_target_itself_are_all_right(on_device):
    """Its keys are those of the text in every cycle, of requests that join and leave a batch too."""
    greedy = dataclasses.replace(GREEDY, max_new_tokens=10, trace=True)
    outputs = on_device(WHOLE, max_batch_size=2).generate(PROMPTS, greedy)
    assert ids(outputs) == ids(on_the_cpu(dataclasses.replace(GREEDY, max_new_tokens=10)))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        first = 3 if len(prompt) > 1 else 0  # a text of one token is not read yet
        assert lengths_of(output)[:2] == [first, 3] and len(output.trace) <= 4


@pytest.mark.quick(1)
@pytest.mark.parametrize("plain", [1, 3, 9])
def test_a_draft_reads_what_plain_cycles_left(on_device, monkeypatch, plain):
    engine, widths = on_device(WHOLE.replace("adaptive=false", "adaptive=true"), max_batch_size=1), []

    def choose(_, size):
        widths.append(1 if len(widths) < plain else 4)
        return widths[-1]

    monkeypatch.setattr(type(engine.core.runner.graphs), "choose", choose)
    many = dataclasses.replace(GREEDY, max_new_tokens=plain + 9)
    output = engine.generate(PROMPTS[0], dataclasses.replace(many, trace=True))
    assert output.token_ids == on_the_cpu(many, prompts=PROMPTS[:1])[0].token_ids
    assert lengths_of(output)[: plain + 2] == [0] * plain + [3, 3]


def test_a_prompt_that_begins_as_an_earlier_one_finds_its_pages(on_device):
    prompt = list(range(3, 80))
    engine = on_device(WHOLE, max_batch_size=1)
    greedy = dataclasses.replace(GREEDY, trace=True)
    first, second = (engine.generate(prompt, greedy) for _ in range(2))
    assert first.token_ids == second.token_ids and lengths_of(second)[0] == 3
    assert engine.drafter.small.cache.prefixes.hit > 0


def test_a_request_that_loses_its_slot_takes_along_what_is_read(on_device, monkeypatch):
    engine, width = on_device(WHOLE.replace("adaptive=false", "adaptive=true"), max_batch_size=1), [1]
    monkeypatch.setattr(type(engine.core.runner.graphs), "choose", lambda *_: width[0])
    greedy = dataclasses.replace(GREEDY, max_new_tokens=14, trace=True)
    stream = engine.stream(PROMPTS[0], greedy)
    for _ in range(3):
        next(stream)
    engine.generate(PROMPTS[3], dataclasses.replace(GREEDY, max_new_tokens=2))
    width[0] = 4
    *_, last = stream
    assert last.output.token_ids == on_the_cpu(greedy, prompts=PROMPTS[:1])[0].token_ids
    lengths = lengths_of(last.output)
    plain = lengths.count(0)
    assert 3 <= plain < 6 and lengths[plain:-1] == [3] * (len(lengths) - plain - 1) != []


def test_the_slot_with_most_unread_tokens_decides_when_to_catch_up():
    state = TextState(2, 4, torch.device("cpu"))
    state.count(0, 3, 9)
    state.count(1, 5, 2)
    assert state.first.tolist() == [3, 5] and state.backlog.is_late(4)
    assert not state.backlog.is_late(4)  # the control: the first cycle has caught up


def test_drafts_reach_beyond_the_end_of_the_context(on_device, monkeypatch):
    """The context is one page: the last drafts lie in another one, behind the target's positions."""
    short = dataclasses.replace(presets.PRESETS["tiny-llama"], max_position=PAGE_SIZE)
    monkeypatch.setitem(presets.PRESETS, "tiny-short", short)
    prompt, greedy = PROMPTS[2][:60], dataclasses.replace(GREEDY, max_new_tokens=99, trace=True)
    output = on_device(WHOLE, "tiny-short", max_batch_size=2).generate(prompt, greedy)
    assert output.token_ids == on_the_cpu(greedy, "tiny-short", [prompt])[0].token_ids
    assert len(output.token_ids) == 4 and lengths_of(output) == [3]


def test_an_engine_whose_target_drafts_leaves_the_rotary_tables_of_earlier_graphs(cuda_backend):
    ops = cuda_ops(cuda_backend.device, strict=True)
    model = load_model("random:tiny-llama", device=cuda_backend.device.type, dtype="float32", ops=ops)
    Engine(model, drafter="none", max_batch_size=1)
    tables = model.target._rope.cos_sin
    Engine(model, drafter=WHOLE, max_batch_size=1)
    assert model.target._rope.cos_sin is tables and len(tables[0]) >= model.config.max_position + 4


def test_drafts_end_with_the_context_of_the_model(on_device, monkeypatch, tmp_path):
    folder = write_folder(tmp_path / "short", random_state(presets.PRESETS["tiny-llama"]))
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | {"max_position_embeddings": 12}))
    greedy = dataclasses.replace(GREEDY, max_new_tokens=20, trace=True)
    output = on_device(f"draft_model:{folder},length=3,adaptive=false", max_batch_size=1).generate(PROMPTS[0], greedy)
    assert output.token_ids == on_the_cpu(greedy, prompts=PROMPTS[:1])[0].token_ids
    length = len(output.prompt_token_ids)
    for cycle in output.trace:
        assert len(cycle.tokens) == (4 if length - 1 + 3 <= 12 else 1)
        length += len(cycle.accepted) + 1


def test_hybrids_alone_draft_between_the_cycles(on_device):
    """The host reads the text into their states before each draft."""
    assert not on_device("draft_model:random:tiny-qwen3.5").drafter.drafts_in_cycle
    assert on_device(PART).drafter.drafts_in_cycle
