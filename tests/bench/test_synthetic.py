"""Synthetic drafters: acceptance is as chosen, and the rest of a cycle is that of the engine."""

import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from specengine import Engine, SamplingParams
from specengine.bench.__main__ import app
from specengine.bench.race import draft_cost
from specengine.bench.race.contenders import Contender, open_contender, split_drafters
from specengine.bench.race.draft_cost import Eagle3, FastEagle
from specengine.bench.race.measure import RaceSettings, measure
from specengine.bench.race.questions import Question
from specengine.bench.race.synthetic import PERIOD, Synthetic, SyntheticEngine, is_synthetic
from specengine.bench.report.run_dicts import run_dicts
from specengine.draft_trees.tree import TreeBatch
from specengine.ops import cuda_ops
from specengine.tensor_parallel.loading import load_model
from specengine.types import PHASES

TINY = "random:tiny-llama"
RATES = (0.9, 0.75, 0.5)
CHAIN = "synthetic:0.9,0.75,0.5"


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY, device="cpu")


def test_the_chance_of_a_token_is_its_depths(tiny):
    drafter = Synthetic.parse(CHAIN, tiny.target)
    shares = (drafter._bends[:, 1:] > 0).float().mean(0)
    assert shares.tolist() == pytest.approx(RATES, abs=4 * (0.25 / PERIOD) ** 0.5)
    # Independent are the depths of a cycle, and one position at two depths.
    both = (drafter._bends[:, 1] > 0) & (drafter._bends[:, 2] > 0)
    assert both.float().mean().item() == pytest.approx(RATES[0] * RATES[1], abs=0.03)
    shifted = (drafter._bends[1:, 1] > 0) & (drafter._bends[:-1, 2] > 0)
    assert shifted.float().mean().item() == pytest.approx(RATES[0] * RATES[1], abs=0.03)


@pytest.mark.parametrize("options", ["", ",k=3", ",k=2,cost=eagle3", ",k=3,cost=fasteagle"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_engine_accepts_what_was_chosen(tiny, options, temperature):
    engine = open_contender(tiny, CHAIN + options, max_batch_size=2)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, top_p=0.95, trace=True)
    outputs = engine.generate([[9] * 3, [8] * 60], params)
    for output in outputs:
        check_acceptance(engine.drafter, output)


def check_acceptance(drafter, output):
    """Every cycle but the last accepts the levels that its root's position decides."""
    position, k = len(output.prompt_token_ids) - 1, drafter.config.k
    for cycle in output.trace[:-1]:
        assert len(cycle.tokens) <= drafter.max_nodes
        wanted = [drafter._bends[position, 1 + level * k] > 0 for level in range((len(cycle.tokens) - 1) // k)]
        levels = wanted.index(False) if False in wanted else len(wanted)
        assert cycle.accepted == tuple(1 + level * k for level in range(levels))
        position += levels + 1
    assert len(output.trace[0].tokens) == drafter.max_nodes and output.stats.tau > 1.5


def test_every_level_hangs_on_the_first_node_of_the_one_before_and_has_distinct_tokens(tiny):
    drafter = Synthetic.parse("synthetic:0.5,0.5,0.5,k=3", tiny.target)
    request = SimpleNamespace(tokens=[5] * 9, draft_limit=2)
    (tree,) = drafter.draft([request]).trees
    assert tree.parents == [-1, 0, 0, 0, 1, 1, 1] and tree.tokens[0] == 5  # no deeper than the limit
    levels = [tree.tokens[1:4], tree.tokens[4:7]]
    assert all(len(set(level)) == 3 and min(level) >= 1 and max(level) < 320 for level in levels)
    assert drafter.max_nodes == 10 and not drafter.adaptive


def test_a_token_is_made_the_targets_choice_or_its_level_is_not(tiny):
    drafter = Synthetic.parse("synthetic:0.5,0.5,k=2", tiny.target)
    for length in range(1, 40):
        (tree,) = drafter.draft([SimpleNamespace(tokens=[5] * length, draft_limit=2)]).trees
        batch = TreeBatch.of([tree], torch.device("cpu"))
        before = torch.randn(5, 320, generator=torch.Generator().manual_seed(length))
        logits = before.clone()
        drafter.bend(logits, batch, torch.tensor([length - 1], dtype=torch.int32))
        for parent, (first, second) in ((0, (1, 2)), (1, (3, 4))):
            drawn = logits[parent].argmax().item()
            accepted = drafter._bends[length - 1, first] > 0
            assert (drawn == tree.tokens[first]) == accepted and drawn != tree.tokens[second]
            logits[parent, [tree.tokens[first], tree.tokens[second]]] = 0
            before[parent, [tree.tokens[first], tree.tokens[second]]] = 0
        assert torch.equal(logits, before)  # all other logits stay


def test_what_drafting_costs_has_the_published_shape(tiny, monkeypatch):
    eagle, fast = Eagle3(tiny.target, 7, 1), FastEagle(tiny.target, 7, 1)
    c = tiny.config
    layer = (
        c.hidden_size * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.hidden_size * c.intermediate_size
    )
    assert eagle.net.config.num_layers == 1 and fast.net.config.num_layers == 7
    assert eagle.net.weight_bytes() > 4 * (layer + c.vocab_size * c.hidden_size)
    assert eagle.net.config.intermediate_size > c.intermediate_size
    calls = []
    plain = draft_cost.Transformer.hidden

    def counted(net, tree, cache, batch):
        calls.append((net.config.num_layers, len(tree.tokens), batch.lengths.tolist()))
        return plain(net, tree, cache, batch)

    monkeypatch.setattr(draft_cost.Transformer, "hidden", counted)
    lengths = torch.tensor([3, c.max_position - 1], dtype=torch.int32)
    Eagle3(tiny.target, 3, 4)(torch.tensor([1, 2], dtype=torch.int32), lengths)
    end = c.max_position - 3
    assert calls == [(1, 8, [3, end]), (1, 8, [4, end + 1]), (1, 8, [5, end + 2])]
    calls.clear()
    marks = []
    fast(torch.tensor([1, -1], dtype=torch.int32), lengths, marks.append)
    assert [call[:2] for call in calls] == [(7, 2)] and marks == ["draft", "expand"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("synthetic", "RATE"),
        ("synthetic:", "RATE"),
        ("synthetic:1.5", "from 0 to 1"),
        ("synthetic:0.5,x", "RATE"),
        ("synthetic:0.5,k=0", "k"),
        ("synthetic:0.5,k=300", "k: expected"),
        ("synthetic:0.5,cost=medusa", "cost: expected none, eagle3 or fasteagle"),
        ("synthetic:0.5,colour=red", "colour"),
        ("synthetic:" + ",".join(["0.5"] * 300) + ",k=10", "nodes"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused(tiny, text, says):
    with pytest.raises(ValueError, match=says):
        Synthetic.parse(text, tiny.target)


def test_numbers_after_the_colon_belong_to_the_synthetic_drafter():
    text = "none,synthetic:0.81,0.80,k=10,cost=eagle3,prompt_lookup,nodes=4,synthetic:1"
    expected = ["none", "synthetic:0.81,0.80,k=10,cost=eagle3", "prompt_lookup,nodes=4", "synthetic:1"]
    assert split_drafters(text) == expected
    assert [is_synthetic(each) for each in expected] == [False, True, False, True]
    assert split_drafters("prompt_lookup,0.5") == ["none", "prompt_lookup", "0.5"]  # no drafter has this name


def test_other_drafters_get_the_ordinary_engine(tiny):
    assert type(open_contender(tiny, "none")) is Engine
    assert type(open_contender(tiny, CHAIN)) is SyntheticEngine


@pytest.mark.parametrize(
    "drafter, rule",
    [
        ("none", "match"),
        (CHAIN, "match"),
        *(("draft-model:self,layers=1", f"{kind}-cascade:chow") for kind in ("token", "seq")),
    ],
)
def test_no_contender_remembers_a_prompt_that_is_asked_again(tiny, drafter, rule):
    engine, params = open_contender(tiny, drafter, rule=rule), SamplingParams(max_new_tokens=3)
    for _ in range(2):
        (output,) = engine.generate([[*range(3, 203)]], params)
        assert output.stats.prefix_hit_tokens == 0
    engines = [engine._small, engine._large] if rule.startswith("seq") else [engine]
    assert [each.cache.prefixes.looked_up for each in engines] == [0] * len(engines)


def test_the_command_measures_them_beside_the_others(tmp_path):
    path = tmp_path / "out.json"
    arguments = ["--model", TINY, "--limit", "1", "--repetitions", "1", "--max-new-tokens", "60", "--ignore-eos"]
    drafters = ["--drafters", f"none,{CHAIN},k=2"]
    result = CliRunner().invoke(app, [*arguments, *drafters, "--prompt-tokens", "100", "--json", str(path)])
    assert result.exit_code == 0, result.stderr
    none, synthetic = json.loads(path.read_text())["runs"]
    assert synthetic["drafter"] == f"{CHAIN},k=2" and synthetic["tau"] > 1.5 and none["tau"] == 1
    assert synthetic["identical"].startswith("0/")  # it changes the text
    assert none["bandwidth_fraction"] > 0 and "of the memory's speed" in " ".join(result.stdout.split())


# ---- on the device


@pytest.fixture
def device_model(cuda_backend):
    ops = cuda_ops(cuda_backend.device)
    return load_model(TINY, device=cuda_backend.device.type, dtype="bfloat16", ops=ops)


@pytest.mark.parametrize("options", ["", ",k=3,cost=fasteagle", ",cost=eagle3"])
def test_the_device_accepts_the_same(device_model, options):
    engine = open_contender(device_model, CHAIN + options, max_batch_size=2)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, trace=True)
    outputs = engine.generate([[9] * 3, [8] * 70], params)
    assert set(engine.core.runner.graphs.batches) == {(1, engine.drafter.max_nodes), (2, engine.drafter.max_nodes)}
    for output in outputs:
        assert len(output.token_ids) == 16
        check_acceptance(engine.drafter, output)


def test_cycles_on_the_device_are_timed_by_phase(device_model):
    (run, other) = measure(
        device_model,
        [Contender("none"), Contender(f"{CHAIN},k=2,cost=fasteagle")],
        [Question("a", ("x",), tokens=70)],
        SamplingParams(max_new_tokens=12, ignore_eos=True),
        RaceSettings(repetitions=1),
    )
    assert set(run.device_seconds) == set(PHASES[:-1])
    assert set(other.device_seconds) == {*PHASES[:-1], "expand", "bend"}
    assert all(seconds > 0 for seconds in other.device_seconds.values())
    rows = run_dicts([run, other], floor_seconds=1e-6, token_seconds=1e-9)
    for row, each in zip(rows, (run, other), strict=True):
        wall = 1e3 * (each.median.seconds - each.median.prefill_seconds) / each.median.passes
        assert sum(row["ms_per_cycle"].values()) == pytest.approx(wall)
        assert row["bandwidth_fraction"] > 0
    json.dumps(rows)


def test_only_cycles_on_the_device_have_clocks(tiny):
    with pytest.raises(ValueError, match="on the device"), open_contender(tiny, "none").timed_phases():
        pass
