"""Peers: other engines run in the race, or are left out with a reason."""

import importlib.util
import json
import time

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import specengine
from specengine.bench.__main__ import app
from specengine.bench.peers import registry
from specengine.bench.peers.base import Answer, Peer, Setup, reason
from specengine.bench.peers.registry import Kind, open_peers, split_peers
from specengine.bench.race.contenders import Contender
from specengine.bench.race.measure import RaceSettings, calls_of, measure
from specengine.bench.race.questions import Question
from specengine.bench.report.run_dicts import run_dicts
from specengine.bench.report.tables import peers_table, table
from specengine.models.checkpoint import expected_tensors
from specengine.tensor_parallel.loading import load_model
from specengine.types import SamplingParams

TINY = "random:tiny-llama"
QUESTIONS = [Question("a", ("x", "y"), "one"), Question("b", ("z",), "two")]
TWICE = RaceSettings(repetitions=2)
needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"), reason="transformers is not installed"
)
needs_llama = pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="llama-cpp-python is not installed")


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY)


def setup_for(model, tmp_path, source=None, weights="") -> Setup:
    return Setup(
        name=model.name,
        source=source or tmp_path,
        config=model.config,
        weights=weights,
        threads=1,
        device="cpu",
        eos_token_ids=model.eos_token_ids,
        scratch=tmp_path,
    )


class Echo(Peer):
    """Answers slowly with tokens of specengine, two at a time."""

    def __init__(self, model, setup, mode="echo", delay=0.0):
        super().__init__(mode, "none", {"version": "1"}, setup)
        self.engine, self.delay, self.asked, self.room = specengine.Engine(model, drafter="none"), delay, [], []

    def prepare(self, positions):
        self.room.append(positions)

    def answer(self, ids, params, stop):
        self.asked.append((ids, params.max_new_tokens, stop))
        time.sleep(self.delay)
        tokens = self.engine.generate([ids], params)[0].token_ids
        deliveries = [(self.delay + i / 1e3, len(tokens[i : i + 2])) for i in range(0, len(tokens), 2)]
        return Answer(tokens, deliveries, len(deliveries))


class Stubborn(Echo):
    """Raises an error in its third call."""

    def answer(self, ids, params, stop):
        if len(self.asked) == 2:
            raise RuntimeError("out of\nluck")
        return super().answer(ids, params, stop)


# ---- in the race


def test_peers_do_the_same_work_and_their_rows_say_so(tiny, tmp_path):
    peer, calls = Echo(tiny, setup_for(tiny, tmp_path), delay=0.05), []
    params = SamplingParams(max_new_tokens=6)
    contenders = [Contender("none"), Contender("prompt_lookup")]
    settings = RaceSettings(batches=(1, 2), repetitions=2)
    runs = measure(tiny, contenders, QUESTIONS, params, settings, peers=[peer], advance=lambda: calls.append(1))
    assert [(run.peer, run.drafter, run.batch) for run in runs] == [
        (None, "none", 1),
        (None, "prompt_lookup", 1),
        ("echo", "none", 1),
        (None, "none", 2),
        (None, "prompt_lookup", 2),
    ]
    assert len(calls) == calls_of(QUESTIONS, settings, 2, peers=1)
    # Three turns twice, after the warm-up. The prompt of the second turn holds the answer of plain decoding.
    assert len(peer.asked) == 1 + 6
    assert {limit for _, limit, _ in peer.asked} == {6} and peer.room == [len(ids) + 6 for ids, _, _ in peer.asked]
    rows = run_dicts(runs)
    ours, lookup, echo, *batch_2 = rows
    assert echo["peer"] == "echo" and echo["identical"] == "3/3" and echo["tau"] == 2
    assert echo["ms_per_cycle"] is None and echo["speedup_over"] == {} and echo["acceptance_by_depth"] == []
    assert echo["prefill_seconds"] == pytest.approx(3 * 0.05) and echo["speedup"] < 1
    for row in (ours, lookup):
        ratio = row["tokens_per_second"] / echo["tokens_per_second"]
        assert row["speedup_over"] == {"echo": pytest.approx(ratio)} and ratio > 1
    assert [row["speedup_over"] for row in batch_2] == [{}, {}]
    json.dumps(rows)
    console = Console(width=220)
    with console.capture() as capture:
        console.print(table(rows, "title"), peers_table(rows))
    text = " ".join(capture.get().split())
    assert "their texts may differ" in text and text.count("echo") == 2


def test_a_peer_that_breaks_down_leaves_the_race_alone(tiny, tmp_path):
    setup = setup_for(tiny, tmp_path)
    peers = [Stubborn(tiny, setup, "stubborn"), Echo(tiny, setup)]
    runs = measure(tiny, [Contender("none")], QUESTIONS, SamplingParams(max_new_tokens=4), TWICE, peers=peers)
    assert [run.peer for run in runs] == [None, "echo"]
    assert peers[0].failed == "RuntimeError: out of luck" and peers[1].failed is None
    assert all(len(run.repetitions) == 2 for run in runs)


def test_the_end_of_text_and_of_the_context_are_those_of_the_model(tiny, tmp_path):
    peer = Echo(tiny, setup_for(tiny, tmp_path))
    ids = [5] * (tiny.config.max_position - 3)
    peer.make_room([ids], SamplingParams(max_new_tokens=8))
    (output,) = peer.generate([ids], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert peer.room == [tiny.config.max_position] and len(output.token_ids) == 3 and output.finish_reason == "length"
    peer.generate([[5]], SamplingParams(max_new_tokens=2))
    assert [stop for _, _, stop in peer.asked] == [frozenset(), tiny.eos_token_ids]


# ---- names and reasons


def test_peers_are_named_with_weight_formats():
    assert split_peers("") == []
    names = ["transformers", "llama.cpp", "llama.cpp:Q8_0"]
    assert split_peers("transformers, llama.cpp,llama.cpp:Q8_0,llama.cpp") == names


@pytest.mark.parametrize("name", ["vllm", "llama.cpp:Q99", "llama.cpp:", "transformers:Q8_0"])
def test_unknown_peers_are_refused(name):
    with pytest.raises(ValueError, match="peers"):
        split_peers(f"transformers,{name}")
    result = CliRunner().invoke(app, ["--model", TINY, "--peers", name])
    assert result.exit_code == 2 and result.stderr.startswith("error: peers: ")


def test_what_cannot_run_is_left_out_with_a_reason(tiny, monkeypatch):
    peers, left_out = open_peers(["llama.cpp"], tiny, 1, None)
    assert peers == [] and set(left_out) == {"llama.cpp"}
    assert TINY in left_out["llama.cpp"] or "not installed" in left_out["llama.cpp"]

    def absent(name, setup):
        raise ModuleNotFoundError("No module named 'x'", name="x")

    monkeypatch.setitem(registry.KINDS, "absent", Kind(absent))
    monkeypatch.setattr(registry, "resolve_model", lambda name: registry.Path("somewhere"))
    assert open_peers(["absent"], tiny, 1, None) == (
        [],
        {"absent": "x is not installed (pip install '.[peers]' in a clone)"},
    )
    assert reason(KeyError("a\nb")) == r"KeyError: 'a\nb'"


def test_the_command_reports_peers(tmp_path, monkeypatch, tiny):
    path, echo = tmp_path / "out.json", {}

    def open_modes(name, setup):
        echo["setup"] = setup
        return [Echo(tiny, setup, name), Stubborn(tiny, setup, "stubborn")]

    monkeypatch.setitem(registry.KINDS, "echo", Kind(open_modes))
    monkeypatch.setattr(registry, "resolve_model", lambda name: tmp_path)
    small = ["--model", TINY, "--limit", "2", "--max-new-tokens", "4", "--repetitions", "1", "--json", str(path)]
    result = CliRunner().invoke(app, [*small, "--peers", "echo", "--prefill", "20"])
    assert result.exit_code == 0 and "left out: stubborn: RuntimeError" in result.stderr, result.stderr
    data = json.loads(path.read_text())
    assert data["peers"] == {"echo": {"version": "1"}} and set(data["peers_left_out"]) == {"stubborn"}
    assert [row["peer"] for row in data["runs"]] == [None, None, "echo"]
    assert set(data["runs"][1]["speedup_over"]) == {"echo"}
    assert [row["peer"] for row in data["prefill"]] == [None, None, "echo"]
    assert echo["setup"].threads == specengine.build_info()["threads"] and not echo["setup"].scratch.exists()
    result = CliRunner().invoke(app, [*small, "--peers", "echo", "--batch", "2"])
    assert result.exit_code == 0 and "batch 1" in json.loads(path.read_text())["peers_left_out"]["echo"]


# ---- transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.4,
        eos_token_id=95,
        bos_token_id=None,
    )
    path = tmp_path_factory.mktemp("tiny")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.full
@needs_transformers
def test_transformers_says_what_we_say(folder, tmp_path):
    model = load_model(str(folder))
    peers, left_out = open_peers(["transformers", "llama.cpp"], model, 2, tmp_path)
    assert [peer.mode for peer in peers] == ["transformers", "transformers+prompt_lookup"]
    assert set(left_out) == {"llama.cpp"}
    questions = [Question(name, ("x",), name) for name in "ab"]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    runs = measure(model, [Contender("none")], questions, params, RaceSettings(repetitions=1), peers=peers)
    assert [peer.failed for peer in peers] == [None, None] and len(runs) == 3
    for run in runs:
        assert all(run.identical.values()) and run.median.tokens == 48
        assert 0 < run.median.prefill_seconds < run.median.seconds
    base, plain, lookup = (run.median for run in runs)
    assert base.cycles == plain.cycles == 48 and lookup.cycles <= 48


@needs_transformers
@pytest.mark.parametrize("position", [0, 1])
def test_transformers_stops_where_we_do(folder, tmp_path, position):
    model = load_model(str(folder))
    ids = [3, 4, 5] * 4
    free = specengine.Engine(model, drafter="none").generate(ids, SamplingParams(max_new_tokens=12, ignore_eos=True))
    end = free.token_ids[5]
    setup = setup_for(model, tmp_path, folder)
    object.__setattr__(setup, "eos_token_ids", frozenset({end}))
    peer = registry.KINDS["transformers"].open_modes("transformers", setup)[position]
    expected = free.token_ids[: free.token_ids.index(end) + 1]
    (output,) = peer.generate([ids], SamplingParams(max_new_tokens=12))
    assert peer.failed is None and output.token_ids == expected and output.finish_reason == "stop"
    (output,) = peer.generate([ids], SamplingParams(max_new_tokens=12, temperature=0.8, ignore_eos=True))
    assert peer.failed is None and len(output.token_ids) == 12


@pytest.mark.full
@needs_transformers
def test_a_static_cache_says_the_same_and_grows_with_the_conversation(folder, tmp_path):
    model = load_model(str(folder))
    (peer,), left_out = open_peers(["transformers:compiled"], model, 2, tmp_path)
    assert left_out == {} and peer.mode == "transformers:compiled" and peer.about["cache"] == "static"
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    runs = measure(model, [Contender("none")], [Question("a", ("x", "y"))], params, TWICE, peers=[peer])
    assert peer.failed is None and [run.peer for run in runs] == [None, "transformers:compiled"]
    assert all(runs[1].identical.values()) and runs[1].median.cycles == 48
    first = peer._cache
    peer.prepare(1023)
    assert peer._cache is first and peer.room == 1024
    peer.prepare(1024)
    assert peer._cache is not first and peer.room == 2048


@needs_transformers
@pytest.mark.parametrize("preset", ["tiny-llama3", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
def test_random_models_race_a_model_of_the_same_shape(preset, tmp_path):
    model = load_model(f"random:{preset}")
    (plain, lookup), left_out = open_peers(["transformers"], model, 1, tmp_path)
    assert left_out == {} and plain.about["weights"] == "float32, its own random"
    theirs = {name: parameter.shape for name, parameter in plain.model.named_parameters()}
    ours = expected_tensors(model.config)
    assert theirs == ours
    for peer in (plain, lookup):
        (output,) = peer.generate([[3, 4, 5] * 3], SamplingParams(max_new_tokens=5, ignore_eos=True))
        assert peer.failed is None and len(output.token_ids) == 5


# ---- llama.cpp


@needs_llama
@pytest.mark.model
def test_llama_cpp_runs_the_same_file_in_several_formats(smollm2_path, tmp_path):
    model = load_model(str(smollm2_path))
    peers, left_out = open_peers(["llama.cpp", "llama.cpp:Q8_0"], model, 2, tmp_path)
    modes = ["llama.cpp", "llama.cpp+prompt_lookup", "llama.cpp:Q8_0", "llama.cpp:Q8_0+prompt_lookup"]
    assert [peer.mode for peer in peers] == modes and left_out == {}
    assert [file.name for file in tmp_path.iterdir()] == ["Q8_0.gguf"]
    ids = model.tokenizer.encode("one two three four one two three four one two three four one two")
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    base = specengine.Engine(model, drafter="none").generate(ids, params)
    for peer in peers:
        for _ in range(2):  # the second call must not reuse the cache of the first
            peer.make_room([ids], params)
            (output,) = peer.generate([ids], params)
            assert peer.failed is None and output.token_ids == base.token_ids
            assert output.stats.prefill_seconds > 0
        assert (output.stats.cycles < 8) == (peer.drafter == "prompt_lookup")
    peers[0].make_room([ids * 100], params)
    assert peers[0].llama.n_ctx() > 1400 and len(peers[0].generate([ids], params)[0].token_ids) == 8
