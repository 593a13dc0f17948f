"""The drafters of docs/adding-your-own.md as files of their own, found by their names."""

import sys
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from specengine import Engine, SamplingParams, drafters
from specengine.drafters import drafter_names
from specengine.rules import Wants
from specengine.train.config import TrainConfig
from specengine.train.data.dialogue_files import Dialogue, write_shard
from specengine.train.export import write_drafter
from specengine.train.objectives.registry import OBJECTIVES, new_objective
from specengine.train.run_log import read_log
from tests.docs.pages import ROOT, Page
from tests.engine.device.prompts import PROMPTS, SAMPLED, on_the_cpu
from tests.engines import ids, tiny_engine, tiny_model
from tests.train import runs

BLOCKS = [block.code for block in Page(ROOT / "docs" / "adding-your-own.md").blocks]
STEPS = TrainConfig(epochs=80, learning_rate=1.5e-2, batch_tokens=1024, rows=1024, evaluate_steps=1000, save_steps=1000)
ANSWERS = SamplingParams(max_new_tokens=24)


@pytest.fixture
def bigram(tmp_path, monkeypatch):
    """Its file, beside the other drafters."""
    (tmp_path / "bigram.py").write_text(BLOCKS[0], encoding="utf-8")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    monkeypatch.setitem(drafters.DRAFTERS, "bigram", "bigram:Bigram")


@pytest.mark.parametrize("rule", ["match", "rejection", "block", "traversal", "typical"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_is_found_by_name_and_serves_rules_that_need_nothing(bigram, rule, temperature):
    assert "bigram" in drafter_names()
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5] * 6, [9]]
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3)
    engine = tiny_engine("bigram,length=4", rule=rule, max_batch_size=2)
    outputs = engine.generate(prompts, params)
    if temperature == 0:  # the random model's draws repeat nothing
        assert sum(output.stats.cycles for output in outputs) < sum(map(len, ids(outputs)))
    if rule == "match":
        assert ids(outputs) == ids(tiny_engine("none").generate(prompts, params))


def test_its_options_are_checked(bigram):
    for wrong in ("bigram,length=0", "bigram,depth=3"):
        with pytest.raises(ValueError, match="bigram"):
            tiny_engine(wrong)


@pytest.fixture
def recurrent(tmp_path, monkeypatch):
    """Its file, somewhere else, and both of its names; makes the objective."""
    code = next(code for code in BLOCKS if "class Recurrent(" in code)
    assert len(code.splitlines()) <= 300
    (tmp_path / "recurrent.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "recurrent", raising=False)
    module = import_module("recurrent")
    monkeypatch.setitem(drafters.DRAFTERS, "recurrent", module.Recurrent)
    monkeypatch.setitem(OBJECTIVES, "recurrent", module.RecurrentObjective)
    torch.manual_seed(0)
    return lambda spec="recurrent": new_objective(spec, runs.target_weights())


def engine_of(drafter: str, **options) -> Engine:
    model = replace(tiny_model(), name="random:seven-layers", target=runs.TARGET, eos_token_ids=frozenset())
    return Engine(model, drafter=drafter, max_batch_size=2, **options)


@pytest.mark.filterwarnings("ignore:drafter")  # an untrained one guesses nothing
def test_a_network_learns_texts_and_then_drafts_them(recurrent, tmp_path):
    prompts = [[3 * i + 1, 5 * i + 2, 90 - i, 7 * i + 3, i + 20] for i in range(8)]
    texts = ids(engine_of("none").generate(prompts, ANSWERS))
    learned = [Dialogue(prompt + text, len(prompt)) for prompt, text in zip(prompts, texts, strict=True)]
    (tmp_path / "data").mkdir()
    write_shard(tmp_path / "data/dialogues-00000.safetensors", learned * 2, {})  # a part is held out

    def tau(rule: str) -> float:
        write_drafter(tmp_path / "draft", *objective.export(), "float32", "")
        engine = engine_of(f"recurrent:{tmp_path / 'draft'},adaptive=false,sample=true", rule=rule)
        outputs = engine.generate(prompts, ANSWERS)
        assert ids(outputs) == texts
        return sum(output.stats.tau for output in outputs) / len(outputs)

    objective = recurrent("recurrent,levels=4")
    rules = "match", "rejection"
    before = [tau(rule) for rule in rules]
    runs.trainer(tmp_path / "out", STEPS, made=objective).run()
    steps = [line for line in read_log(tmp_path / "out/training.jsonl") if "held_out" not in line]
    assert all(last < 0.8 * first for first, last in zip(steps[0]["loss"], steps[-1]["loss"], strict=True))
    after = [tau(rule) for rule in rules]
    assert all(late > 1.7 * early for early, late in zip(before, after, strict=True)), (before, after)


@pytest.mark.filterwarnings("ignore:drafter")
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_captured_cycles_draft_the_trees_of_the_cpu(recurrent, device_engine, tmp_path, rule):
    write_drafter(tmp_path / "draft", *recurrent().export(), "float32", "")
    spec = f"recurrent:{tmp_path / 'draft'},adaptive=false,sample=true,levels=3,nodes=20"
    params = replace(SAMPLED, max_new_tokens=6, trace=True)
    expected = on_the_cpu(params, drafter=spec, rule=rule)
    engine = device_engine(spec, max_batch_size=3, rule=rule)
    assert engine.drafter.gives_logits(Wants.SAMPLES)  # rejection gets drawn children and their distributions
    outputs = engine.generate(PROMPTS, params)
    assert ids(outputs) == ids(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [(step.tokens, step.accepted) for step in ours.trace] == [(s.tokens, s.accepted) for s in theirs.trace]
    assert any(len(step.tokens) > 4 for output in outputs for step in output.trace)
    if rule == "match":
        assert ids(outputs) == ids(on_the_cpu(params))
