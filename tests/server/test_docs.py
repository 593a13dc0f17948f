"""docs/server.md: its client code runs, and its tables equal the code's."""

import json

import pytest
import typer

from specengine.cli import main as cli
from specengine.server.chat.schema import ChatRequest, Message
from specengine.server.chat.tools import Function, Tool, ToolCall
from specengine.server.schema import CompletionRequest, Speculation, StreamOptions
from specengine.tensor_parallel.loading import load_model
from specengine.tool_calls.dialects import DIALECTS
from tests.docs.pages import ROOT, Page
from tests.server.servers import served

PAGE, TOOLS_PAGE = Page(ROOT / "docs" / "server.md"), Page(ROOT / "docs" / "tools.md")

pytestmark = pytest.mark.docs


def rows(head: str, page: Page = PAGE) -> list[list[str]]:
    """Returns the rows of the table whose head begins with `head`."""
    lines = page.text.partition(f"\n| {head} |")[2].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


@pytest.mark.model
def test_the_clients_code_runs_and_says_what_the_engine_says(smollm2_path, capsys):
    (block,) = (block for block in PAGE.blocks if block.language == "python")
    model = load_model(smollm2_path, device="cpu")
    with served(model, name="smollm2-135m", drafters=("auto", "none", "prompt_lookup")) as address:
        code = block.code.replace("http://127.0.0.1:8000", address)
        assert code != block.code
        exec(compile(code, PAGE.name, "exec"), {"__name__": "snippet"})
    whole, streamed = capsys.readouterr().out.split("\n")[:2]
    assert whole == "The capital of France is Paris. 8"
    assert streamed.startswith("The capital of France is Paris.") and float(streamed.removeprefix(whole[:-2])) >= 1


@pytest.mark.model
def test_the_code_of_the_tools_page_runs(smollm2_path, capsys):
    (block,) = (block for block in TOOLS_PAGE.blocks if block.language == "python")
    model = load_model(smollm2_path, device="cpu")
    with served(model, name="smollm2-135m", drafters=("prompt_lookup", "none")) as address:
        code = block.code.replace("http://127.0.0.1:8000", address)
        assert code != block.code
        exec(compile(code, TOOLS_PAGE.name, "exec"), {"__name__": "snippet"})
    call, answer = capsys.readouterr().out.split("\n", 1)
    name, arguments = call.split(" ", 1)
    assert name == "get_weather" and set(json.loads(arguments)) == {"city"} and answer.strip()


def test_the_table_of_dialects_is_the_registrys():
    assert [row[0].strip("`") for row in rows("dialect", TOOLS_PAGE)] == list(DIALECTS)


def test_the_table_of_refused_fields_is_the_schemas():
    refused = {**ChatRequest.unsupported, **CompletionRequest.unsupported}
    told = {
        row[0].strip("`"): [json.loads(each.strip(" `")) for each in row[1].split(", ") if each]
        for row in rows("field")
    }
    assert told == {name: list(neutral) for name, (_, *neutral) in refused.items()} and list(told) == sorted(told)


def test_the_table_of_accepted_fields_is_the_schemas():
    kinds = {"request": ChatRequest, "message": Message, "tool": Tool, "function": Function, "call": ToolCall}
    kinds["`stream_options`"] = StreamOptions
    told = {name: {row[0].strip("`") for row in rows("accepted field") if name in row[1]} for name in kinds}
    assert told == {name: kind.ignored for name, kind in kinds.items()}
    assert CompletionRequest.ignored == ChatRequest.ignored


def test_the_table_of_speculation_is_the_schemas():
    told = [name.strip(" `") for row in rows("key") for name in row[0].split(",")]
    assert told == list(Speculation.model_fields)


def test_the_table_of_limits_has_the_commands_defaults():
    command = typer.main.get_command(cli.app).commands["serve"]
    defaults = {option.opts[0]: option.default for option in command.params}
    told = {row[0].strip("`"): row[1] for row in rows("option")}
    assert told == {name: str(defaults[name]) for name in told}
    assert {name for name in defaults if name.startswith("--max")} | {"--deadline", "--drain"} == set(told)


def test_every_option_on_the_page_exists():
    command = typer.main.get_command(cli.app).commands["serve"]
    known = {name for option in command.params for name in option.opts}
    spoken = {span.split()[0] for page in (PAGE, TOOLS_PAGE) for span in page.spans if span.startswith("--")}
    assert len(spoken) > 8 and spoken <= known
