"""The console script: its output on stdout and stderr, and its errors."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import specengine
from specengine.cli.chat import Chat
from specengine.cli.console import show_trace
from specengine.cli.main import app
from specengine.cli.models import random_presets
from specengine.hub import embedded_models
from specengine.models.presets import PRESETS
from specengine.types import CycleTrace, StreamEvent
from tests.adapters.files import write_adapter
from tests.models.files import write_chat_model

TINY = "random:tiny-llama"


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def one_error_line(result, *parts: str) -> None:
    lines = result.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    assert result.stdout == ""
    for part in parts:
        assert part in lines[0]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> str:
    return str(write_chat_model(tmp_path_factory.mktemp("chat-model")))


# ---- the whole script


def test_version_names_the_build():
    result = run("--version")
    assert result.exit_code == 0
    assert f"specengine {specengine.__version__}" in result.stdout
    assert specengine.build_info()["compiler"] in result.stdout
    assert "instruction sets: " in result.stdout and "CUDA" in result.stdout


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("generate", "chat", "models", "train", "corpus", "report"):
        assert command in result.stdout


def test_runs_as_a_process_with_answer_and_errors_on_their_own_streams():
    command = [sys.executable, "-c", "from specengine.cli.main import main; main()", "generate", "--model", TINY]
    good = subprocess.run([*command, "3 4 5", "--max-new-tokens=4"], capture_output=True, text=True)
    assert good.returncode == 0 and len(good.stdout.split()) == 4 and "tau" in good.stderr
    bad = subprocess.run([*command, "3 4 5", "--max-new-tokens=0"], capture_output=True, text=True)
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr.startswith("error: max_new_tokens: ") and bad.stderr.count("\n") == 1


# ---- generate


def test_generate_has_every_parameter_of_the_api_with_its_default():
    command = next(c for c in app.registered_commands if c.callback.__name__ == "generate")
    options = inspect.signature(command.callback).parameters
    for name, parameter in inspect.signature(specengine.generate).parameters.items():
        if name not in ("prompts", "adapters"):  # --adapter names a folder too
            # typer passes None for a repeatable option that is absent
            assert options[name].default == (None if name in ("stop", "stop_token_ids") else parameter.default), name


def test_a_constraint_comes_from_options_and_files(tmp_path):
    model, schema = str(write_chat_model(tmp_path / "model")), tmp_path / "schema.json"
    schema.write_text('{"enum": [{"a": 1}, {"a": 2}]}', encoding="utf-8")
    (tmp_path / "grammar.lark").write_text('start: "one" | "two"', encoding="utf-8")
    for options, texts in (
        (("--json-schema", str(schema)), ('{"a": 1}', '{"a": 2}')),
        (("--grammar", str(tmp_path / "grammar.lark")), ("one", "two")),
        (("--regex", "a(b|c)"), ("ab", "ac")),
        (("--choice", "yes", "--choice", "no"), ("yes", "no")),
    ):
        result = run("generate", "Hi", "--model", model, "--max-new-tokens", "20", *options)
        assert result.stdout.strip() in texts, result.stderr
    assert run("generate", "Hi", "--model", model, "--regex", "(").stderr.startswith("error: regex: ")
    missing = run("generate", "Hi", "--model", model, "--grammar", str(tmp_path / "none"))
    assert missing.exit_code == 2 and "error: grammar: no such file" in missing.stderr
    schema.write_bytes(b"\xff")
    assert "error: json_schema: expected UTF-8" in run("chat", "--json-schema", str(schema)).stderr


def test_generate_json_is_one_object_equal_to_the_api():
    drafter = "prompt_lookup,adaptive=false"  # others draft by measured times
    words = f"--model {TINY} --drafter {drafter} --max-new-tokens 9 --logprobs 2 --trace --json"
    result = run("generate", "3 4 5", *words.split())
    assert result.exit_code == 0 and result.stderr == ""
    expected = specengine.generate([3, 4, 5], model=TINY, drafter=drafter, max_new_tokens=9, logprobs=2, trace=True)
    expected, found = json.loads(json.dumps(expected.to_dict())), json.loads(result.stdout)
    assert set(found) == set(expected)
    for data in (expected, found):
        data["stats"] = {key: data["stats"][key] for key in ("cycles", "tau", "acceptance_by_depth")}
    assert found == expected


def test_generate_options_reach_the_engine():
    words = "--temperature 0.9 --top-k 50 --top-p 0.95 --min-p 0.01 --repetition-penalty 1.2 --presence-penalty -0.3"
    words += " --frequency-penalty 0.2 --logit-bias 7=3.5 --logit-bias 9=-2 --seed 5 --ignore-eos --max-new-tokens 24"
    words += " --drafter prompt_lookup,min_ngram=1 --dtype float32 --device cpu --rule match --json"
    found = json.loads(run("generate", "3 4 5 3 4 5", "--model", TINY, *words.split()).stdout)
    settings = {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 3.5, 9: -2.0},
        "seed": 5,
        "ignore_eos": True,
        "max_new_tokens": 24,
        "model": TINY,
    }
    assert found["token_ids"] == specengine.generate([3, 4, 5, 3, 4, 5], **settings).token_ids
    for left_out in ("temperature", "top_k", "repetition_penalty", "logit_bias", "seed"):
        less = {key: value for key, value in settings.items() if key != left_out}
        assert found["token_ids"] != specengine.generate([3, 4, 5, 3, 4, 5], **less).token_ids, left_out


def test_generate_ends_at_a_stop_token_unless_it_comes_too_early():
    def tokens(*options: str) -> list[int]:
        return json.loads(run("generate", "3 4 5", "--model", TINY, "--json", *options).stdout)["token_ids"]

    whole = tokens("--max-new-tokens", "12")
    end = whole.index(whole[6]) + 1
    stop = ("--max-new-tokens", "12", "--stop-token-id", "1", "--stop-token-id", str(whole[6]))
    assert tokens(*stop) == whole[:end]
    late = tokens(*stop, "--min-tokens", str(end))
    assert late[: end - 1] == whole[: end - 1] and late[end - 1] != whole[6] and len(late) > end


def test_generate_n_gives_several_outputs():
    arguments = ("generate", "3 4 5", "--model", TINY, "-n", "3", "--temperature", "1", "--max-new-tokens", "6")
    outputs = json.loads(run(*arguments, "--json").stdout)["outputs"]
    assert len(outputs) == 3 and len({tuple(output["token_ids"]) for output in outputs}) == 3
    plain = run(*arguments)
    assert [line for line in plain.stdout.splitlines() if line.startswith("[")] == ["[1/3]", "[2/3]", "[3/3]"]
    assert " ".join(map(str, outputs[1]["token_ids"])) in plain.stdout


def test_generate_streams_exactly_the_text_and_sums_up_on_stderr(chat_model):
    arguments = ("generate", "abc", "--model", chat_model, "--max-new-tokens", "30")
    plain, data = run(*arguments), json.loads(run(*arguments, "--json").stdout)
    assert plain.stdout == data["text"] + "\n"
    (line,) = plain.stderr.splitlines()
    for part in ("tokens/s", "tau", "cycles", "drafter prompt_lookup"):
        assert part in line


@pytest.mark.parametrize(
    ("rule", "says"),
    [("match", None), ("rejection", "rule rejection, finished"), ("margin:theta=0.5", "rule margin (lossy, ")],
)
def test_the_summary_names_a_rule_that_is_not_the_default_and_what_it_relaxed(chat_model, rule, says):
    told = run("generate", "x", "--model", chat_model, "--max-new-tokens", "8", "--rule", rule).stderr
    assert says in told if says else "rule" not in told


def test_the_summary_tells_how_the_parts_of_a_combination_did(chat_model):
    drafter = "combine:prompt_lookup+suffix,adaptive=false"
    arguments = ("generate", "x", "--model", chat_model, "--max-new-tokens", "40", "--drafter", drafter)
    sources = json.loads(run(*arguments, "--json").stdout)["stats"]["sources"]
    assert "suffix" in sources and all(set(stats) == {"drafted", "accepted"} for stats in sources.values())
    assert re.search(r"drafter combine \(accepted: (\w+ \d+/\d+(, )?)+\), finished", run(*arguments).stderr)


def test_generate_applies_the_chat_template_unless_raw(chat_model):
    def prompt_length(*arguments):
        result = run("generate", "abc", "--model", chat_model, "--max-new-tokens", "1", "--json", *arguments)
        return len(json.loads(result.stdout)["prompt_token_ids"])

    assert prompt_length() == len("[user]abc[assistant]")
    assert prompt_length("--system", "xy") == len("[system]xy[user]abc[assistant]")
    assert prompt_length("--raw") == len("abc")


def test_generate_reads_stdin_for_a_dash(chat_model):
    result = run("generate", "-", "--model", chat_model, "--raw", "--max-new-tokens", "1", "--json", stdin="a\nbc\n")
    assert len(json.loads(result.stdout)["prompt_token_ids"]) == len("a\nbc")


def test_generate_ends_at_a_stop_string(chat_model):
    arguments = ("generate", "abc", "--model", chat_model, "--max-new-tokens", "40", "--json")
    text = json.loads(run(*arguments).stdout)["text"]
    stop = next(char for char in text[5:] if char != "�")
    stopped = json.loads(run(*arguments, "--stop", "not there", "--stop", stop).stdout)
    assert stopped["finish_reason"] == "stop" and stopped["text"] == text[: text.index(stop)]


def test_trace_and_logprobs_leave_stdout_to_the_text():
    arguments = ("generate", "3 4 5 3 4 5", "--model", TINY, "--max-new-tokens", "8")
    plain, shown = run(*arguments), run(*arguments, "--trace", "--logprobs", "2")
    assert shown.stdout == plain.stdout
    assert "cycle 1: drafted" in shown.stderr
    assert sum("|" in line for line in shown.stderr.splitlines()) == 8


def test_trace_marks_accepted_nodes(capsys):
    cycle = CycleTrace(tokens=(9, 1, 2, 3, 4), parents=(-1, 0, 1, 1, 3), accepted=(1, 3), bonus=7)
    show_trace([cycle], str)
    lines = [line.strip("│├└─ ") for line in capsys.readouterr().err.splitlines()]
    assert lines == ["cycle 1: drafted 4, accepted 2, bonus '7'", "+ '1'", "- '2'", "+ '3'", "- '4'"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--temperature", "-1"), ("temperature",)),
        (("--drafter", "nonsense"), ("drafter", "nonsense")),
        (("--drafter", "prompt_lookup,nodes=x"), ("nodes",)),
        (("--rule", "nonsense"), ("rule", "match")),
        (("--dtype", "int3"), ("dtype", "bfloat16")),
        (("--device", "tpu"), ("device",)),
        (("--logit-bias", "5"), ("logit_bias", "ID=VALUE")),
        (("--logit-bias", "5=1", "--logit-bias", "5=2"), ("logit_bias", "twice")),
        (("--logit-bias", "5=nan"), ("logit_bias",)),
        (("--stop", "x"), ("stop", "tokenizer")),
        (("--system", "x"), ("system", "template")),
        (("--max-new-tokens", "0", "--json"), ("max_new_tokens",)),
    ],
)
def test_bad_options_give_one_line_and_status_2(arguments, parts):
    result = run("generate", "3 4", "--model", TINY, *arguments)
    assert result.exit_code == 2
    one_error_line(result, *parts)


@pytest.mark.parametrize("model", ["nowhere/model.gguf", "no-such-model", "random:no-such-preset"])
def test_an_unknown_model_gives_one_line_and_status_2(model):
    result = run("generate", "3", "--model", model)
    assert result.exit_code == 2
    one_error_line(result, model.removeprefix("random:"))


@pytest.mark.parametrize("prompt", ["", "hello", "3 999"])
def test_a_prompt_that_is_no_token_ids_is_refused_without_a_tokenizer(prompt):
    result = run("generate", prompt, "--model", TINY)
    assert result.exit_code == 2
    one_error_line(result, "prompt")


@pytest.mark.parametrize("error", [specengine.ModelFetchError("pip said:\n  nothing\n"), MemoryError("cache: no room")])
def test_other_failures_give_one_line_and_status_1(error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(specengine.engine.engine, "load_model", fail)
    result = run("generate", "hello")
    assert result.exit_code == 1
    one_error_line(result, str(error).split()[0])


# ---- chat


def test_chat_answers_line_by_line_and_remembers(chat_model):
    result = run("chat", "--model", chat_model, "--max-new-tokens", "5", stdin="ab\n\n/what\n/reset\nab\n/exit\nab\n")
    assert result.exit_code == 0
    assert result.stderr.count("tau ") == 2
    assert "unknown command /what" in result.stderr and "conversation cleared" in result.stderr
    answer = specengine.generate([{"role": "user", "content": "ab"}], model=chat_model, max_new_tokens=5).text
    assert result.stdout == f"{answer}\n" * 2


def test_chat_gives_the_history_and_the_system_message_to_the_model(chat_model):
    session = Chat(specengine.Engine(chat_model), specengine.SamplingParams(max_new_tokens=4), "be kind")
    session.answer("one")
    session.answer("two")
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    expected = session.engine.generate(session.messages[:4], session.params).text
    assert session.messages[4]["content"] == expected


def test_chat_survives_a_full_context(chat_model):
    result = run("chat", "--model", chat_model, "--max-new-tokens", "3", stdin=f"{'long ' * 200}\nab\n")
    assert result.exit_code == 0
    assert "error: prompt: has" in result.stderr and "/reset" in result.stderr
    answer = specengine.generate([{"role": "user", "content": "ab"}], model=chat_model, max_new_tokens=3).text
    assert result.stdout == f"{answer}\n"


def test_chat_says_when_an_answer_was_cut_by_the_context(chat_model):
    result = run("chat", "--model", chat_model, "--max-new-tokens", "9999", "--logit-bias", "2=-1e6", stdin="ab\n")
    assert "context of 512 tokens is full" in result.stderr
    assert "--max-new-tokens" in run("chat", "--model", chat_model, "--max-new-tokens", "2", stdin="ab\n").stderr


def test_chat_needs_a_chat_template():
    result = run("chat", "--model", TINY, stdin="hi\n")
    assert result.exit_code == 2
    one_error_line(result, "chat template")


class FakeEngine:
    """Yields given events, and raises a given exception in its place."""

    def __init__(self, tokenizer, events):
        self.tokenizer, self.events = tokenizer, events
        self.model = SimpleNamespace(name="fake", config=SimpleNamespace(max_position=512))

    def stream(self, messages, params):
        for event in self.events:
            if isinstance(event, BaseException):
                raise event
            yield event


def test_chat_colours_accepted_tokens_and_never_splits_a_character(chat_model, monkeypatch):
    tokenizer = specengine.Engine(chat_model).tokenizer
    a, *euro, b = tokenizer.encode("a€b", add_special_tokens=False)
    last = SimpleNamespace(token_ids=[a, *euro, b], finish_reason="stop", stats=SimpleNamespace(tau=2.5))
    events = [StreamEvent("a", [a, euro[0]], 1), StreamEvent("€b", [*euro[1:], b], 2, last)]
    shown = []
    monkeypatch.setattr("specengine.cli.chat.typer.secho", lambda text, fg=None, **_: shown.append((text, fg)))
    Chat(FakeEngine(tokenizer, events), specengine.SamplingParams()).answer("x")
    assert shown[:3] == [("a", "green"), ("€", "green"), ("b", None)]


def test_chat_keeps_what_was_said_before_ctrl_c(chat_model, capsys):
    tokenizer = specengine.Engine(chat_model).tokenizer
    ids = tokenizer.encode("ab", add_special_tokens=False)
    session = Chat(FakeEngine(tokenizer, [StreamEvent("ab", ids, 1), KeyboardInterrupt()]), specengine.SamplingParams())
    session.answer("x")
    assert session.messages[-1] == {"role": "assistant", "content": "ab"}
    printed = capsys.readouterr()
    assert printed.out == "ab\n" and printed.err == "stopped\n"


# ---- models


@pytest.mark.parametrize("arguments", [("specengine", "models"), ("specengine.cli", "generate", "--help")])
def test_a_reader_that_stops_reading_hears_no_complaint(arguments):
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_models_lists_embedded_models_and_presets():
    result = run("models")
    assert result.exit_code == 0
    for name in (*embedded_models.EMBEDDED, *(f"random:{preset}" for preset in PRESETS)):
        assert name in result.stdout
    data = json.loads(run("models", "--json").stdout)
    assert {entry["name"] for entry in data["embedded"]} == set(embedded_models.EMBEDDED)
    assert {entry["name"] for entry in data["random"]} == {f"random:{preset}" for preset in PRESETS}


@pytest.mark.parametrize("columns", [80, 60])
def test_models_cuts_no_value_in_a_narrow_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = run("models").stdout.splitlines()
    assert max(map(len, lines)) <= columns and not any("…" in line for line in lines)
    if columns == 80:  # of most terminals: a preset has one line
        for preset in random_presets():
            (line,) = (line for line in lines if f" {preset['name']} " in line)
            assert [cell.strip() for cell in line.strip("│").split("│")] == [*map(str, preset.values())]


def test_models_check_tells_missing_from_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECENGINE_CACHE", str(tmp_path))

    def state(*arguments):
        result = run("models", "--json", *arguments)
        return json.loads(result.stdout)["embedded"][0]["state"], result.exit_code

    assert state("--check") == ("not fetched", 0)
    path = embedded_models._cache_path("smollm2-135m")
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(embedded_models.EMBEDDED["smollm2-135m"].gguf_bytes)
    assert state() == ("cached", 0)
    assert state("--check") == ("damaged", 1)


@pytest.mark.model
def test_models_check_verifies_the_fetched_file(smollm2_path):
    result = run("models", "--check", "--json")
    assert result.exit_code == 0
    (entry,) = json.loads(result.stdout)["embedded"]
    assert entry["state"] == "verified" and Path(entry["path"]) == smollm2_path


# ---- the real model


@pytest.mark.model
def test_the_default_model_answers_a_question(smollm2_path):
    result = run("generate", "Name the capital of France.", "--max-new-tokens", "24")
    assert result.exit_code == 0 and "Paris" in result.stdout


@pytest.mark.full
@pytest.mark.model
@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT to a process")
def test_ctrl_c_stops_an_answer_and_keeps_the_session(smollm2_path):
    command = [sys.executable, "-u", "-m", "specengine.cli.main", "chat", "--max-new-tokens", "2000"]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # A background job of a shell ignores Ctrl-C, and children inherit that, so the child restores the handler.
    restore = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    with subprocess.Popen(command, **streams, **restore) as process:
        process.stdin.write(b"Count from 1 to 1000, one number per line.\n")
        process.stdin.flush()
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(b"Say hello.\n", timeout=300)
    lines = [line for line in errors.decode().splitlines() if line]
    assert process.returncode == 0 and lines[0] == "stopped" and lines[-1].startswith("tau ")


# ---- adapters


def test_an_adapter_answers_on_the_command_line(tmp_path):
    folder = write_adapter(tmp_path, PRESETS["tiny-llama"])
    options = ("--model", TINY, "--drafter", "none", "--max-new-tokens", "6", "--json")
    bare, adapted = (
        json.loads(run("generate", "5 9 13", *options, *more).stdout)["token_ids"]
        for more in ((), ("--adapter", f"x={folder}"))
    )
    engine = specengine.Engine(TINY, drafter="none", adapters={"x": folder})
    params = specengine.SamplingParams(max_new_tokens=6, adapter="x")
    assert adapted == engine.generate([5, 9, 13], params).token_ids != bare


@pytest.mark.parametrize("command", [("generate", "5"), ("chat",), ("serve",)], ids=lambda command: command[0])
def test_an_adapter_without_name_or_folder_is_refused(command):
    for text in ("folder", "=folder", "name="):
        result = run(*command, "--model", TINY, "--adapter", text)
        assert result.exit_code == 2
        one_error_line(result, f"adapter: expected NAME=PATH, got '{text}'")
