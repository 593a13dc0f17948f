"""The benchmark: questions, races, statistics, tables and files; no test depends on speed."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

import specengine
from specengine.bench import machine
from specengine.bench.__main__ import app
from specengine.bench.race.contenders import Contender, split_drafters
from specengine.bench.race.measure import RaceSettings, calls_of, measure
from specengine.bench.race.questions import RANDOM_TOKENS, SCHEMAS, Question, load_questions, prompt_of
from specengine.bench.race.run import Run
from specengine.bench.race.run_stats import RunStats
from specengine.bench.report.labels import short_labels
from specengine.bench.report.plot import save
from specengine.bench.report.plot_drafters import drafters_figure
from specengine.bench.report.run_dicts import run_dicts
from specengine.bench.report.tables import acceptance_table, table
from specengine.bench.report.writing import write_json
from specengine.drafters.none import NoneDrafter
from specengine.models.presets import PRESETS
from specengine.tensor_parallel.loading import load_model
from specengine.types import PHASES, CycleTrace, SamplingParams
from tests.adapters.files import write_adapter
from tests.constraints.vocabulary import talking_model

TINY = "random:tiny-llama"
SMALL = ("--model", TINY, "--limit", "2", "--max-new-tokens", "12", "--repetitions", "2")
QUESTIONS = [Question("a", ("x", "y")), Question("b", ("z",)), Question("c", ("u", "v"))]
ONCE = RaceSettings(repetitions=1)


@pytest.fixture(scope="module")
def tiny():
    return load_model(TINY)


def bench(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def write_lines(folder, *lines: str):
    path = folder / "questions.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# ---- questions


def test_built_in_questions_are_about_ten_of_several_kinds():
    questions = load_questions()
    assert 8 <= len(questions) <= 12 and len({q.name for q in questions}) == len(questions)
    assert len({q.category for q in questions}) >= 6
    assert {len(q.turns) for q in questions} == {1, 2}


def test_questions_are_read_in_mt_bench_form(tmp_path):
    path = write_lines(
        tmp_path,
        '{"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": ["x"]}',
        "",
        '{"turns": ["three"]}',
        '{"turns": ["four"]}',
    )
    first, second = load_questions(path, limit=2)
    assert first == Question("81", ("one", "two"), "writing")
    assert second == Question("3", ("three",), "questions")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "JSON"),
        ("[1]", "turns"),
        ('"turns"', "turns"),
        ('{"prompt": "x"}', "turns"),
        ('{"turns": "x"}', "non-empty strings"),
        ('{"turns": []}', "non-empty strings"),
        ('{"turns": ["x", 3]}', "non-empty strings"),
        ('{"turns": ["x", " "]}', "non-empty strings"),
    ],
)
def test_a_bad_question_is_refused_with_its_line(tmp_path, line, says):
    path = write_lines(tmp_path, '{"turns": ["good"]}', "", line)
    with pytest.raises(ValueError, match=f"line 3: .*{says}"):
        load_questions(path)
    result = bench("--model", TINY, "--questions", str(path))
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {path}, line 3: ") and result.stderr.count("\n") == 1


def test_files_without_questions_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="holds no questions"):
        load_questions(write_lines(tmp_path, "", " "))
    (tmp_path / "questions.jsonl").write_bytes(b'{"turns": ["\xff"]}')
    with pytest.raises(ValueError, match="UTF-8"):
        load_questions(tmp_path / "questions.jsonl")
    with pytest.raises(ValueError, match="limit"):
        load_questions(limit=0)


def test_a_question_may_have_a_schema_for_its_answers(tmp_path):
    path = write_lines(tmp_path, '{"turns": ["one"], "json_schema": {"type": "integer"}}', '{"turns": ["two"]}')
    first, second = load_questions(path)
    params = SamplingParams(max_new_tokens=4)
    assert first.params(params) == dataclasses.replace(params, json_schema={"type": "integer"})
    assert second.params(params) is params
    with pytest.raises(ValueError, match=r"line 1: json_schema: "):
        load_questions(write_lines(tmp_path, '{"turns": ["one"], "json_schema": true}'))
    assert len(load_questions(SCHEMAS)) == 60


def test_answers_of_a_race_have_their_questions_schemas():
    model, schema = talking_model(), {"enum": [{"name": "the"}, {"age": 3}]}
    questions = [Question("a", ("x", "y"), json_schema=json.dumps(schema)), Question("b", ("name",))]
    params = SamplingParams(max_new_tokens=30, temperature=1.0)
    runs = measure(model, [Contender("none"), Contender("prompt_lookup")], questions, params, ONCE)
    for run in runs:
        assert all(run.identical.values())
        assert [json.loads(run.answers[0, 0, turn].text) in schema["enum"] for turn in (0, 1)] == [True, True]
        assert run.answers[1, 0, 0].finish_reason == "length"
    with pytest.raises(ValueError, match=r"^questions: only"):
        measure(
            model, [Contender("none"), Contender("draft-model:self,layers=1", "seq-cascade")], questions, params, ONCE
        )


def test_later_turns_carry_the_answers_before_them(tiny):
    question, answers = Question("q", ("first", "second")), [SimpleNamespace(text="told", token_ids=[5, 6])]
    chat = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=True))
    assert prompt_of(question, [], chat) == [{"role": "user", "content": "first"}]
    assert prompt_of(question, answers, chat) == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "told"},
        {"role": "user", "content": "second"},
    ]
    plain = SimpleNamespace(tokenizer=SimpleNamespace(has_chat_template=False))
    assert prompt_of(question, answers, plain) == "first\n\ntold\n\nsecond"
    first, second = prompt_of(question, [], tiny), prompt_of(question, answers, tiny)
    assert len(first) == RANDOM_TOKENS and second[: RANDOM_TOKENS + 2] == [*first, 5, 6]
    assert first == prompt_of(question, [], tiny) != prompt_of(question, [], tiny, seed=1)


# ---- drafters


@pytest.mark.parametrize(
    ("text", "drafters"),
    [
        ("none,prompt_lookup", ["none", "prompt_lookup"]),
        ("prompt_lookup", ["none", "prompt_lookup"]),
        ("prompt_lookup,nodes=16, length=4,none", ["prompt_lookup,nodes=16,length=4", "none"]),
        ("none,eagle:/a=b/c,depth=3", ["none", "eagle:/a=b/c,depth=3"]),
        ("none,none", ["none", "none"]),
    ],
)
def test_options_belong_to_the_drafter_before_them(text, drafters):
    assert split_drafters(text) == drafters


@pytest.mark.parametrize("text", ["", "none,,prompt_lookup", "nodes=3,none"])
def test_lists_that_are_no_drafters_are_refused(text):
    with pytest.raises(ValueError, match="drafters"):
        split_drafters(text)


@pytest.mark.parametrize(
    ("drafters", "labels"),
    [
        (["none", "fasteagle", "prompt_lookup,nodes=4"], ["none", "fasteagle", "prompt_lookup,nodes=4"]),
        (["fasteagle:/runs/a", "fasteagle:/runs/b/,top_k=2"], ["fasteagle:a", "fasteagle:b,top_k=2"]),
        (["eagle3:runs/1/best", "eagle3:runs/2/best"], ["eagle3:1/best", "eagle3:2/best"]),
        (["eagle3:best", "eagle3:runs/best"], ["eagle3:best", "eagle3:runs/best"]),
        (["eagle3:runs/best", "fasteagle:more/best"], ["eagle3:best", "fasteagle:best"]),
        (["eagle:a/x", "eagle:a/x,levels=2"], ["eagle:x", "eagle:x,levels=2"]),
        (["synthetic:0.8,0.7,k=10"], ["synthetic:0.8,0.7,k=10"]),
    ],
)
def test_labels_are_short_and_tell_checkpoints_apart(drafters, labels):
    assert short_labels(drafters) == labels


# ---- measuring


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_answer_is_that_of_the_base(tiny, temperature):
    calls = []
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=3)
    drafters = ["prompt_lookup,adaptive=false", "none"]
    contenders = [Contender(name) for name in drafters]
    settings = RaceSettings(batches=(1, 2), repetitions=2)
    runs = measure(tiny, contenders, QUESTIONS, params, settings, advance=lambda: calls.append(1))
    assert [(run.drafter, run.batch) for run in runs] == [(name, batch) for batch in (1, 2) for name in drafters]
    for run in runs:
        # Two batches of two ask the first of three questions twice, which has two turns.
        assert list(run.identical.values()) == [True] * (5 if run.batch == 1 else 7)
        assert len(run.repetitions) == 2
    assert len(calls) == calls_of(QUESTIONS, settings, len(drafters))
    by_drafter = {run.drafter: run.median for run in runs if run.batch == 1}
    assert by_drafter["none"].tokens == by_drafter[drafters[0]].tokens
    # Without drafts the answers would be equal in any case.
    assert by_drafter[drafters[0]].drafted and not by_drafter["none"].drafted


def test_a_drafter_that_changes_the_answers_is_found_out(tiny, monkeypatch):
    seen = []

    class Cheat(NoneDrafter):
        """Changes the answer of every second request."""

        def draft(self, requests):
            for request in requests:
                if len(request.tokens) == request.prompt_length:
                    seen.append(request)
                if len(seen) % 2 == 0:
                    request.tokens[-1] = 7
            return super().draft(requests)

    real = specengine.engine.engine.load_drafter
    monkeypatch.setattr(
        specengine.engine.engine,
        "load_drafter",
        lambda text, target: Cheat(None, None, target) if text == "cheat" else real(text, target),
    )
    contenders = [Contender("none"), Contender("cheat")]
    honest, cheat = measure(tiny, contenders, QUESTIONS, SamplingParams(max_new_tokens=8), ONCE)
    assert all(honest.identical.values()) and len(honest.identical) == 5
    assert 0 < sum(cheat.identical.values()) < 5


def test_the_base_may_be_measured_against_itself(tiny):
    runs = measure(tiny, [Contender("none")] * 2, QUESTIONS[:1], SamplingParams(max_new_tokens=4), ONCE)
    assert len(runs) == 2 and all(all(run.identical.values()) for run in runs)


def test_the_order_of_the_drafters_rotates(tiny, monkeypatch):
    order = []
    real = specengine.Engine.generate

    def spy(self, prompts, params):
        order.append(self.drafter.name)
        return real(self, prompts, params)

    monkeypatch.setattr(specengine.Engine, "generate", spy)
    contenders = [Contender("none"), Contender("prompt_lookup")]
    measure(tiny, contenders, QUESTIONS[1:2], SamplingParams(max_new_tokens=3), RaceSettings(repetitions=2))
    warm_up, first, second = order[:2], order[2:4], order[4:]
    assert sorted(warm_up) == sorted(first) == ["none", "prompt_lookup"] and first == second[::-1]


def test_a_question_too_long_for_the_model_is_named(tiny):
    question = Question("q17", ("x",) * 20)
    with pytest.raises(ValueError, match="question q17: prompt: has"):
        measure(tiny, [Contender("none")], [question], SamplingParams(max_new_tokens=4), ONCE)


def test_counts_agree_with_the_engine(tiny):
    engine = specengine.Engine(tiny, drafter="prompt_lookup,nodes=5,adaptive=false")
    output = engine.generate([3, 4, 5] * 9, SamplingParams(max_new_tokens=60, trace=True))
    stats = RunStats()
    stats.add([output], seconds=9.0)
    assert stats.acceptance_by_depth == output.stats.acceptance_by_depth != []
    assert stats.tau == output.stats.tau > 1
    assert (stats.cycles, stats.passes, stats.tokens) == (output.stats.cycles, output.stats.cycles, 60)
    assert sum(stats.phase_seconds.values()) + stats.prefill_seconds == pytest.approx(9.0)


def test_a_batch_counts_its_passes_once(tiny):
    outputs = specengine.Engine(tiny, drafter="none").generate(
        [[3, 4], [5, 6], [7, 8]], SamplingParams(max_new_tokens=10, ignore_eos=True, trace=True)
    )
    stats = RunStats()
    stats.add(outputs, seconds=1.0)
    assert (stats.passes, stats.cycles, stats.tokens, stats.tau) == (10, 30, 30, 1.0)


def test_a_level_is_accepted_or_not_once_the_one_above_was():
    chain = {"tokens": (1, 2, 3, 4), "parents": (-1, 0, 1, 2)}
    trace = [
        CycleTrace(**chain, accepted=(1, 2, 3), bonus=5),
        CycleTrace(**chain, accepted=(1,), bonus=5),
        CycleTrace(**chain, accepted=(), bonus=5),
        CycleTrace((1, 2, 3), (-1, 0, 0), accepted=(2,), bonus=5),  # nothing was drafted below
        CycleTrace(**chain, accepted=(1, 2), bonus=None),  # the end: the target did not judge the third token
    ]
    timings = SimpleNamespace(cycles=5, prefill_seconds=0.0, deliveries=[], seconds_by_phase=dict.fromkeys(PHASES, 0.0))
    output = SimpleNamespace(stats=timings, token_ids=[0] * 9, prompt_token_ids=[0], trace=trace)
    stats = RunStats()
    stats.add([output], seconds=1.0)
    assert stats.reached == [5, 3, 1] and stats.level_acceptance == [4 / 5, 2 / 3, 1]
    assert stats.acceptance_by_depth == [4 / 5, 2 / 4, 1 / 4]


def test_a_level_that_was_never_reached_has_no_share():
    assert RunStats(drafted=[3, 3], accepted=[0, 0], reached=[3, 0]).level_acceptance == [0, None]


# ---- results


def stats_of(seconds: float) -> RunStats:
    phases = dict.fromkeys(PHASES, seconds / 10)
    levels = {"drafted": [40, 20], "accepted": [30, 5], "reached": [40, 10]}
    return RunStats(seconds, seconds / 2, phases, passes=50, cycles=50, tokens=100, **levels)


def test_results_are_of_the_repetition_of_median_time():
    base = Run("none", 1, [stats_of(4.0), stats_of(5.0), stats_of(20.0)], {(0, 0, 0): True})
    fast = Run("fast", 1, [stats_of(2.5), stats_of(1.0), stats_of(3.0)], {(0, 0, 0): True, (0, 0, 1): False})
    _, row = run_dicts([base, fast], floor_seconds=0.001)
    assert row["speedup"] == 2 and row["tokens_per_second"] == 40 and row["seconds"] == 2.5
    assert row["tokens_per_second_spread"] == [pytest.approx(100 / 3), 100]
    assert row["tau"] == 2 and row["acceptance_by_depth"] == [0.75, 0.25] and row["identical"] == "1/2"
    assert row["ms_per_cycle"] == dict.fromkeys(PHASES, pytest.approx(5.0)) and row["floor_fraction"] == 0.2


def test_the_table_shows_every_number_and_says_what_tau_counts():
    rows = run_dicts([Run("none", 2, [stats_of(5.0)], {(0, 0, 0): True})])
    text = printed(table(rows, "a title"))
    for part in ("a title", "none", "20.0 (20.0-20.0)", "1.00x", "2.00", "50%", "1/1", "bonus token"):
        assert part in text
    assert "none │ 2 │ 0.75 │ 0.50 │ │" in printed(acceptance_table(rows))


def printed(what) -> str:
    console = Console(width=170)
    with console.capture() as capture:
        console.print(what)
    return " ".join(capture.get().split())


def test_what_a_drafter_does_on_the_host_counts_where_cycles_run_on_the_device():
    seconds = dict.fromkeys(("draft", "verify", "accept", "compact"), 0.001)
    run = Run("none", 1, [stats_of(5.0)], {(0, 0, 0): True}, device_seconds=seconds)
    (row,) = run_dicts([run])
    assert row["ms_per_cycle"]["draft"] == pytest.approx(1 + 10) and row["ms_per_cycle"]["verify"] == 1
    assert sum(row["ms_per_cycle"].values()) == pytest.approx(50)


@pytest.mark.full
def test_a_picture_has_peers_and_drafters_that_drafted_nothing(tmp_path):
    idle = RunStats(1.0, 0.5, dict.fromkeys(PHASES, 0.1), passes=10, cycles=10, tokens=10)
    mute = RunStats(1.0, 0.5, tokens=10)  # a peer that reports no cycles
    done = [("none", idle, None), ("eagle3:a/b", stats_of(5.0), None), ("none", mute, "llama.cpp")]
    runs = [Run(name, 1, [stats], peer=peer, temperature=t) for t in (0.0, 1.0) for name, stats, peer in done]
    rows = run_dicts(runs)
    assert [row["label"] for row in rows[:3]] == ["none", "eagle3:b", "llama.cpp"]
    save(drafters_figure, {"model": "m", "questions": 1, "max_new_tokens": 9, "runs": rows}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_holds_what_was_written_with_a_line_for_each_run(tmp_path):
    data = {"a": [1, None, 2.5], "b": {}, "c": [], "d": [{"e": [["x\u00e9\n", "y"]]}, {"f": '"]'}], "g": [[], {}]}
    write_json(tmp_path / "out.json", data)
    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    assert json.loads(text) == data and text.endswith("}\n")
    lines = [line.strip() for line in text.splitlines()]
    assert '"a": [1, null, 2.5],' in lines and '{"e": [["x\\u00e9\\n", "y"]]},' in lines and '{"f": "\\"]"}' in lines


def test_a_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})

    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1} and os.listdir(tmp_path) == ["out.json"]


def test_the_commit_is_that_of_the_source_tree_only(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "specengine"
    package.mkdir()
    file = package / "__init__.py"
    file.write_text("")
    git("init")
    git("add", ".")
    git("commit", "-m", "first", "--no-gpg-sign")
    monkeypatch.setattr(machine, "__file__", str(package / "bench" / "machine.py"))
    assert machine.commit() == git("rev-parse", "HEAD")
    file.write_text("# changed")
    assert machine.commit() == git("rev-parse", "HEAD") + "-dirty"
    deeper = tmp_path / "venv" / "specengine"
    deeper.mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(deeper / "bench" / "machine.py"))
    assert machine.commit() is None


# ---- the command


def test_the_command_prints_tables_and_writes_json_and_a_picture(tmp_path):
    path, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ("--drafters", "prompt_lookup,nodes=4,adaptive=false", "--batch", "1,2", "--json", str(path))
    arguments += ("--plot", str(picture))
    result = bench(*SMALL, *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stderr == "" and "identical" in result.stdout and "prompt_lookup" in result.stdout
    data = json.loads(path.read_text())
    assert {"machine", "versions", "commit", "model", "runs"} <= set(data)
    assert {"cpu", "cores", "memory", "os"} <= set(data["machine"]) and data["machine"]["cores"] >= 1
    assert {"specengine", "python", "torch", "numpy"} <= set(data["versions"])
    assert (data["model"], data["questions"], data["max_new_tokens"], data["dtype"]) == (TINY, 2, 12, "float32")
    assert [(row["drafter"], row["batch"]) for row in data["runs"]] == [
        (name, batch) for batch in (1, 2) for name in ("none", "prompt_lookup,nodes=4,adaptive=false")
    ]
    answers = sum(len(q.turns) for q in load_questions(limit=2))
    for row in data["runs"]:
        assert row["peer"] is None and row["rule"] == "match" and row["temperature"] == 0
        assert row["identical"] == f"{answers}/{answers}"
        assert set(row["ms_per_cycle"]) == set(PHASES) and row["tau"] >= 1 and row["tokens_per_second"] > 0
        assert all(0 <= share <= 1 for share in row["acceptance_by_depth"])
        spent = row["prefill_seconds"] + sum(row["ms_per_cycle"].values()) * row["passes"] / 1e3
        assert spent == pytest.approx(row["seconds"])
        assert len(row["level_acceptance"]) == len(row["level_cycles"]) == len(row["acceptance_by_depth"])
    assert [row["speedup"] for row in data["runs"] if row["drafter"] == "none"] == [1, 1]
    assert "acceptance by depth" in result.stdout and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_the_module_runs_as_a_process():
    command = [sys.executable, "-m", "specengine.bench", *SMALL, "--drafters", "none", "--temperature", "0.7"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "bonus token" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--batch", "0"), "batch"),
        (("--batch", "1;2"), "batch"),
        (("--repetitions", "0"), "repetitions"),
        (("--limit", "0"), "limit"),
        (("--drafters", "nonsense"), "drafter"),
        (("--drafters", "none,prompt_lookup,colour=red"), "colour"),
        (("--temperature", "-1"), "temperature"),
        (("--rule", "nonsense"), "rule"),
        (("--model", "random:no-such-preset"), "no-such-preset"),
        (("--questions", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--json", "nowhere/out.json"), "json"),
        (("--plot", "nowhere/out.png"), "plot"),
        (("--perplexity", "--plot", "out.png"), "plot: expected a run of drafters or rules"),
    ],
)
def test_bad_options_give_one_line_and_status_2(arguments, says):
    result = bench(*SMALL, *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and says in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.full
@pytest.mark.model
def test_the_default_model_holds_conversations(smollm2_path, tmp_path):
    path, questions = tmp_path / "out.json", write_lines(tmp_path, '{"turns": ["Say hello.", "Say it again."]}')
    small = ("--max-new-tokens", "12", "--repetitions", "1")
    result = bench("--questions", str(questions), *small, "--json", str(path))
    assert result.exit_code == 0, result.stderr
    data = json.loads(path.read_text())
    assert [row["identical"] for row in data["runs"]] == ["2/2", "2/2"]


def test_drafters_are_measured_with_an_adapter(tmp_path):
    folder, path = write_adapter(tmp_path / "adapter", PRESETS["tiny-llama"]), tmp_path / "out.json"
    result = bench(*SMALL, "--adapter", f"mine={folder}", "--json", str(path))
    assert result.exit_code == 0, result.stderr
    data = json.loads(path.read_text())
    assert data["adapter"] == "mine" and {row["identical"] for row in data["runs"]} == {"4/4"}
    for arguments, says in ((("--peers", "transformers"), "not --peers"), (("--rules", "margin"), "not --rules")):
        refused = bench(*SMALL, "--adapter", f"mine={folder}", *arguments)
        assert refused.exit_code == 2 and says in refused.stderr
    assert "adapter: expected NAME=PATH" in bench(*SMALL, "--adapter", "mine").stderr
