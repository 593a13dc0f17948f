"""The command: its options, what it says when it cannot start, and that it needs an extra."""

import socket
import sys

import httpx
import pytest
from typer.testing import CliRunner

from specengine import cli
from tests.serve.servers import chat_folder, command


def run(*options: str, **environment: str):
    return CliRunner().invoke(cli.app, ["serve", "--model", str(chat_folder()), *options], env=environment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "random:tiny-llama"], "model: random:tiny-llama has no tokenizer"),
        (["--drafter", "magic"], "drafter: expected auto or one of"),
        (["--rule", "magic"], "rule: expected one of"),
        (["--allow-rule", "magic"], "rule: expected one of"),
        (["--rule", "lossy"], "rule: lossy needs"),
        (["--port", "-1"], "port: expected an integer"),
        (["--host", "no.such.host.invalid"], "host: 'no.such.host.invalid' is no address"),
        (["--host", "192.0.2.1"], "port: cannot listen on 192.0.2.1"),
        (["--max-streams", "0"], "max_streams: expected"),
        (["--deadline", "-5"], "deadline: expected"),
        (["--api-key", "a b"], "api_key: expected printable"),
    ],
)
def test_what_cannot_be_served_is_one_line(options, message):
    result = run("--port", "0", *options)
    assert result.exit_code == 2 and message in result.output and result.output.count("\n") == 1


def test_a_port_that_is_taken_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run("--port", str(taken.getsockname()[1]))
    assert result.exit_code == 2 and "port: cannot listen on 127.0.0.1" in result.output


def test_without_the_extra_it_says_what_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("specengine.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = run()
    assert result.exit_code == 2 and "pip install 'specengine[serve]'" in result.output


def test_options_reach_the_server(monkeypatch):
    monkeypatch.setenv("SPECENGINE_API_KEY", "from-the-environment")
    options = ["--name", "mine", "--rule", "typical:epsilon=0.1", "--allow-drafter", "suffix", "--host", "localhost"]
    with command("--model", str(chat_folder()), "--drafter", "none", *options) as (address, _):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        headers = {"authorization": "Bearer from-the-environment"}
        (model,) = httpx.get(f"{address}/v1/models", headers=headers).json()["data"]
    assert model["id"] == "mine" and model["context_length"] == 512
    assert model["speculation"] == {
        "drafters": ["none", "suffix", "prompt_lookup"],
        "rules": ["typical:epsilon=0.1", "match", "rejection", "traversal"],
    }
