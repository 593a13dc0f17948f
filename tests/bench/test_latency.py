"""Latency, peak memory, and the sources of the tokens of an answer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from specengine import Engine, SamplingParams
from specengine.bench.race.contenders import Contender
from specengine.bench.race.latency import gaps, latency_dict, latency_table, percentile
from specengine.bench.race.measure import RaceSettings, measure
from specengine.bench.race.memory import measure_memory, peak_memory
from specengine.bench.race.questions import Question
from specengine.bench.race.token_sources import MOST, token_sources
from specengine.bench.report.run_dicts import run_dicts
from specengine.bench.suite import Plan, run_suite
from specengine.tensor_parallel.loading import load_model
from specengine.types import CycleTrace, GenerationOutput, GenerationStats

TINY = "random:tiny-llama"
QUESTIONS = [Question("a", ("x", "y")), Question("b", ("z",))]


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY)


# ---- latency


def test_tokens_of_one_cycle_are_delivered_at_once():
    assert gaps([(0.5, 1), (0.75, 3), (1.75, 1)]) == [0.25, 0.0, 0.0, 1.0]
    assert gaps([(0.5, 1)]) == gaps([]) == []


def test_percentiles_are_values_that_occurred():
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (50, 95, 99)] == [50, 95, 99]
    assert percentile([3.0], 99) == 3 and percentile([], 50) is None
    assert percentile([1.0, 2.0, 9.0], 50) == 2


def test_every_run_says_what_its_readers_waited_for(tiny):
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    contenders = [Contender("none"), Contender("prompt_lookup,adaptive=false")]
    runs = measure(tiny, contenders, QUESTIONS, params, RaceSettings(batches=(1, 2), repetitions=1))
    for run, row in zip(runs, run_dicts(runs), strict=True):
        stats = run.median
        assert len(stats.first_tokens) == 3 and len(stats.gaps) == stats.tokens - 3
        assert row["first_token_ms"] == pytest.approx(1e3 * sorted(stats.first_tokens)[1])
        waits = row["token_gap_ms"]
        assert 0 <= waits["p50"] <= waits["p95"] <= waits["p99"] == pytest.approx(1e3 * max(stats.gaps))
        # The gap is 0 for each accepted token, because it is delivered with another token.
        at_once = sum(gap == 0 for gap in stats.gaps)
        assert at_once == stats.tokens - stats.cycles and (at_once > 0) == (run.drafter != "none")


def test_the_table_of_waits_has_a_cell_for_what_is_not_known():
    row = {"label": "x", "batch": 2, "floor_fraction": 0.875, "peak_memory_bytes": 3 << 20}
    known = [{**row, **latency_dict([0.5], [0.001] * 99 + [0.25])}]
    unknown = [{**row, **latency_dict([], []), "floor_fraction": None, "peak_memory_bytes": None}]
    console = Console(width=160)
    with console.capture() as capture:
        console.print(latency_table(known + unknown))
    text = " ".join(capture.get().split())
    assert "x │ 2 │ 500.0 │ 1.0 │ 1.0 │ 1.0 │ 88% │ 3 MiB" in text and "x │ 2 │ │ │ │ │ │ │" in text


# ---- one race


def test_all_settings_take_turns_in_every_repetition(tiny, monkeypatch):
    order = []
    real = Engine.generate

    def spy(self, prompts, params):
        order.append((params.temperature, len(prompts)))
        return real(self, prompts, params)

    monkeypatch.setattr(Engine, "generate", spy)
    settings = RaceSettings(temperatures=(0.0, 0.8), batches=(1, 2), repetitions=2)
    runs = measure(tiny, [Contender("none")], [QUESTIONS[1]], SamplingParams(max_new_tokens=3), settings)
    each = [(0.0, 1), (0.0, 2), (0.8, 1), (0.8, 2)]
    assert order == each * 3  # a warm-up and two repetitions
    assert [(run.temperature, run.batch) for run in runs] == each
    assert all(row["speedup"] == 1 for row in run_dicts(runs))


# ---- memory


def test_memory_is_measured_once_per_configuration_in_a_process_of_its_own(tiny, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "specengine.bench.race.memory.peak_memory", lambda *what: asked.append(what) or 1000 + len(asked)
    )
    params = SamplingParams(max_new_tokens=3)
    contenders = [Contender("none"), Contender("prompt_lookup")]
    settings = RaceSettings(temperatures=(0.0, 0.8), batches=(1, 2))
    runs = measure(tiny, contenders, QUESTIONS, params, settings)
    measure_memory(runs, TINY, "float32")
    assert [(drafter, rule, len(prompts)) for _, _, drafter, rule, prompts in asked] == [
        (drafter, "match", batch) for batch in (1, 2) for drafter in ("none", "prompt_lookup")
    ]
    assert [row["peak_memory_bytes"] for row in run_dicts(runs)] == [1001, 1002, 1003, 1004] * 2


@pytest.mark.full
def test_the_peak_is_that_of_the_other_process(tiny):
    ballast = bytearray(b"x") * (3 << 28)  # memory of this process, which must not count
    peak = peak_memory(TINY, "float32", "prompt_lookup", "match", [[1, 2, 3]])
    assert 1 << 25 < peak < len(ballast)
    with pytest.raises(ValueError, match=r"memory: nonsense: .*nonsense"):
        peak_memory(TINY, "float32", "nonsense", "match", [[1, 2, 3]])


def test_memory_is_refused_where_the_cache_takes_all_of_it(tiny):
    plan = Plan([Contender("none")], RaceSettings(repetitions=1), memory=True)
    device = replace(tiny, target=SimpleNamespace(ops=SimpleNamespace(on_device=True)))
    with pytest.raises(ValueError, match="memory: on CUDA"):
        run_suite(plan, device, QUESTIONS, SamplingParams())


# ---- sources of tokens


def answer(tokens, trace):
    return GenerationOutput("", tokens, [1], "length", None, GenerationStats(), trace)


def test_every_token_has_the_source_that_proposed_it():
    trace = [
        CycleTrace((0, 5, 6), (-1, 0, 1), accepted=(1, 2), bonus=7, sources=(("text", "eagle3"), ("eagle3",))),
        CycleTrace((7,), (-1,), accepted=(), bonus=8),
        CycleTrace((8, 9), (-1, 0), accepted=(1,), bonus=None),
    ]
    assert token_sources(answer([5, 6, 7, 8, 9], trace), "suffix", None) == [
        ("5 ", "text+eagle3"),
        ("6 ", "eagle3"),
        ("7 ", "target"),
        ("8 ", "target"),
        ("9 ", "suffix"),
    ]


def test_an_engines_own_answer_is_told_apart(tiny):
    engine = Engine(tiny, drafter="combine:prompt_lookup+prompt_lookup;max_ngram=2,adaptive=false")
    output = engine.generate([3, 4, 5] * 9, SamplingParams(max_new_tokens=150, ignore_eos=True, trace=True))
    pieces = token_sources(output, "combine", None)
    assert [int(text) for text, _ in pieces] == output.token_ids[:MOST]
    cycles, drafted = 0, {"prompt_lookup", "prompt_lookup,max_ngram=2"}
    for _, source in pieces:
        cycles += source == "target"
        assert source == "target" or set(source.split("+")) <= drafted
    assert 0 < cycles < len(pieces)
    assert token_sources(replace(output, trace=None), "combine", None) == []


@pytest.mark.model
def test_the_pieces_of_an_answer_are_its_text(smollm2_path):
    model = load_model(str(smollm2_path))
    engine = Engine(model, drafter="prompt_lookup,adaptive=false")
    output = engine.generate("Naïve café: 日本語, 日本語, 日本", SamplingParams(max_new_tokens=24, trace=True))
    pieces = token_sources(output, "prompt_lookup", model.tokenizer)
    assert "".join(text for text, _ in pieces) == output.text.removesuffix("\ufffd")
