"""Classes of questions, perplexity, prefill, passes and linear layers."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from specengine.bench.__main__ import app
from specengine.bench.kernels.rows import time_linear, time_rows
from specengine.bench.machine import OthersCPU
from specengine.bench.quality import perplexity as perplexity_module
from specengine.bench.quality.perplexity import TEXT, perplexities, perplexity, perplexity_table
from specengine.bench.race.contenders import Contender
from specengine.bench.race.measure import RaceSettings, measure
from specengine.bench.race.prefill import long_prompt, time_prefill
from specengine.bench.race.questions import Question, load_files
from specengine.bench.report.run_dicts import run_dicts
from specengine.bench.report.tables import table
from specengine.draft_trees.tree import TreeBatch
from specengine.models.weights import DTYPES
from specengine.tensor_parallel.loading import load_model
from specengine.types import SamplingParams

TINY = "random:tiny-llama"


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY)


def bench(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


# ---- classes


def test_several_files_give_their_names_as_classes(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"turns": ["a"], "category": "math"}\n{"turns": ["b"]}\n{"turns": ["c"]}')
    (tmp_path / "code.jsonl").write_text('{"question_id": "q", "turns": ["d"]}\n{"turns": ["e"]}')
    files = [tmp_path / "chat.jsonl", tmp_path / "code.jsonl"]
    found = [(q.name, q.category) for q in load_files(files)]
    assert found == [("chat:1", "math"), ("chat:2", "chat"), ("chat:3", "chat"), ("code:q", "code"), ("code:2", "code")]
    assert [q.name for q in load_files(files, limit=1)] == ["chat:1", "code:q"]
    assert [q.name for q in load_files(files, per_class=1)] == ["chat:1", "chat:2", "code:q"]
    assert [q.name for q in load_files(files[1:])] == ["q", "2"]
    with pytest.raises(ValueError, match="per_class"):
        load_files(files, per_class=0)


def test_every_class_is_compared_with_the_base(tiny):
    questions = [Question("a", ("x", "y"), "chat"), Question("b", ("z",), "code"), Question("c", ("u",), "chat")]
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    contenders = [Contender("none"), Contender("prompt_lookup")]
    runs = measure(tiny, contenders, questions, params, RaceSettings(batches=(1, 3), repetitions=3))
    rows = run_dicts(runs)
    for row, run in zip(rows[:2], runs[:2], strict=True):
        assert {name: found["tokens"] for name, found in row["by_class"].items()} == {"chat": 15, "code": 5}
        spent = [sum(stats.by_class[name].seconds for name in row["by_class"]) for stats in run.repetitions]
        assert spent == pytest.approx(row["seconds_by_repetition"])
    base, lookup = (row["by_class"] for row in rows[:2])
    assert [found["speedup"] for found in base.values()] == [1, 1]
    for name, found in lookup.items():
        assert found["speedup"] == pytest.approx(found["tokens_per_second"] / base[name]["tokens_per_second"])
    # A batch of several classes counts for none of them. Only one question has a last turn.
    assert {name: found["tokens"] for name, found in rows[2]["by_class"].items()} == {"chat": 5}
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(rows, ""))
    slowest = min(lookup, key=lambda name: lookup[name]["speedup"])
    assert f"{lookup[slowest]['speedup']:.2f}x {slowest}" in capture.get()


# ---- perplexity


def test_perplexity_is_that_of_each_chunk_by_itself(tiny):
    ids = torch.randint(tiny.config.vocab_size, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    nats, count = 0.0, 0
    for begin in range(0, 150, 100):
        chunk = ids[begin : begin + 100]
        cache = tiny.target.new_cache()
        tiny.target.ensure_positions(len(chunk))
        view = cache.batch([cache.allocate(len(chunk))], [0])
        logits = tiny.target.forward(TreeBatch.chains([chunk], tiny.target.device), cache, view).scores.double()
        for row, token in zip(logits, chunk[1:], strict=False):
            nats += (row.logsumexp(0) - row[token]).item()
            count += 1
    assert count == 148
    assert perplexity(tiny.target, ids, context=100) == pytest.approx(math.exp(nats / count), rel=1e-12)
    with pytest.raises(ValueError, match="two tokens"):
        perplexity(tiny.target, [1])


def test_every_dtype_has_a_line(monkeypatch, tiny):
    class Letters:
        def encode(self, text):
            return [ord(letter) % 256 for letter in text[:300]]

    def load(model, *, device, dtype):
        if dtype == "auto":
            raise ValueError("dtype: not for this model")
        loaded = load_model(TINY, device=device, dtype=dtype)
        return SimpleNamespace(target=loaded.target, tokenizer=Letters())

    monkeypatch.setattr(perplexity_module, "load_model", load)
    rows = perplexities("letters")
    assert [row["dtype"] for row in rows] == list(dict.fromkeys(["float32", "auto", *DTYPES]))
    assert rows[0]["ratio"] == rows[0]["bytes_ratio"] == 1 and rows[1]["reason"] == "dtype: not for this model"
    half = next(row for row in rows if row["dtype"] == "bfloat16")
    assert half["bytes_ratio"] < 0.6 and 0.9 < half["ratio"] < 1.1 and half["perplexity"] != rows[0]["perplexity"]
    assert [row["dtype"] for row in perplexities("letters", dtype="bfloat16")] == ["float32", "bfloat16"]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(perplexity_table(rows, "a title"))
    assert "bfloat16" in capture.get() and "not for this model" in capture.get()


def test_a_model_without_tokenizer_has_no_perplexity():
    result = bench("--model", TINY, "--perplexity")
    assert result.exit_code == 2 and "no tokenizer" in result.stderr and result.stdout == ""


def test_the_text_is_long_and_mixed():
    text = TEXT.read_text(encoding="utf-8")
    assert 1200 <= len(text.split()) <= 1500 and "def " in text and '"' in text and "1,204" in text


@pytest.mark.full
@pytest.mark.model
def test_the_command_prints_perplexity(smollm2_path, tmp_path):
    path = tmp_path / "out.json"
    result = bench("--model", str(smollm2_path), "--perplexity", "--dtype", "float32", "--json", str(path))
    assert result.exit_code == 0 and "perplexity" in result.stdout, result.stderr
    (row,) = json.loads(path.read_text())["perplexity"]
    assert row["dtype"] == "float32" and 5 < row["perplexity"] < 60


# ---- prompts and passes


def test_prompts_have_exactly_the_tokens_asked_for(tiny):
    assert len(long_prompt(tiny, 17)) == 17
    text = SimpleNamespace(tokenizer=SimpleNamespace(encode=lambda text: [1, 2, 3]), config=tiny.config)
    assert long_prompt(text, 5) == [1, 2, 3, 1, 2]
    rows = time_prefill(tiny, ["none", "prompt_lookup"], [], long_prompt(tiny, 17), repetitions=1)
    assert [row["drafter"] for row in rows] == ["none", "prompt_lookup"] and rows[0]["ratio"] == 1
    assert all(row["tokens"] == 17 and row["seconds"] > 0 for row in rows)
    assert rows[1]["ratio"] == pytest.approx(rows[1]["seconds"] / rows[0]["seconds"])


def test_a_linear_layer_is_timed_in_every_format_of_the_model(tiny):
    (found,) = time_linear(tiny.target, mib=1)
    assert found["format"] == "float32" and found["bytes_per_second"] > 0 and found["read_bytes_per_second"] > 0


def test_passes_are_timed_by_their_rows(tiny):
    rows = time_rows(tiny.target, [8, 4])
    assert [row["rows"] for row in rows] == [1, 4, 8] and rows[0]["ratio"] == 1
    assert all(row["ms"] > 0 and row["ratio"] == pytest.approx(row["ms"] / rows[0]["ms"]) for row in rows)


@pytest.mark.full
def test_the_command_reports_prompts_and_passes(tmp_path):
    path = tmp_path / "out.json"
    small = ("--model", TINY, "--limit", "1", "--max-new-tokens", "3", "--repetitions", "1", "--json", str(path))
    result = bench(*small, "--prefill", "9", "--rows", "1,2")
    assert result.exit_code == 0 and "a prompt of 9 tokens" in result.stdout and "over one row" in result.stdout
    data = json.loads(path.read_text())
    assert data["one_row_linear"]
    assert [row["rows"] for row in data["rows"]] == [1, 2] and [row["tokens"] for row in data["prefill"]] == [9, 9]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--prefill", "0"), "prefill"),
        (("--prefill", "1000000"), "prefill"),
        (("--rows", "0"), "rows"),
        (("--rows", "1;2"), "rows"),
        (("--rows", "100000"), "rows"),
        (("--per-class", "0"), "per_class"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, says):
    result = bench("--model", TINY, *arguments)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {says}") and result.stderr.count("\n") == 1


def test_the_work_of_others_is_not_ours():
    others = OthersCPU()
    sum(range(3_000_000))
    cores = others.cores()
    assert cores is None or cores >= 0
