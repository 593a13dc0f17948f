"""`specengine serve`: its options, its errors at the start, and the extra that it needs."""

import socket
import sys

import pytest

from specengine.server import command
from specengine.server.settings import Settings
from tests.server.commands import run
from tests.server.servers import chat_folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "random:tiny-llama"], "model: random:tiny-llama has no tokenizer"),
        (["--drafter", "magic"], "drafter: expected auto or one of"),
        (["--rule", "magic"], "rule: expected one of"),
        (["--allow-rule", "magic"], "rule: expected one of"),
        (["--rule", "lossy"], "rule: lossy needs"),
        (["--port", "-1"], "port: expected an integer"),
        (["--host", "no.such.host.invalid"], "host: 'no.such.host.invalid' is not an address"),
        (["--host", "192.0.2.1"], "port: cannot listen on 192.0.2.1"),
        (["--max-streams", "0"], "max_streams: expected"),
        (["--deadline", "-5"], "deadline: expected"),
        (["--api-key", "a b"], "api_key: expected printable"),
        (["--allowed-origins", "https://app.example/"], "allowed_origins: expected * or SCHEME://HOST[:PORT] without"),
        (["--allowed-origins", "app.example"], "allowed_origins: expected"),
        (["--allowed-origins", '["*"'], "is not a JSON list"),
        (["--allowed-origins", "[5]"], "allowed_origins: expected"),
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
    for name in [name for name in sys.modules if name.startswith("specengine.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = run()
    assert result.exit_code == 2 and "pip install 'specengine[serve]'" in result.output


def test_options_reach_the_server(monkeypatch):
    served = []
    monkeypatch.setattr(command, "serve", lambda *arguments: served.append(arguments))
    options = ["--name", "mine", "--rule", "typical:epsilon=0.1", "--allow-drafter", "suffix", "--allow-host", "here"]
    pages = ["--allowed-origins", "http://a", "--allowed-origins", '["https://b:1", "*"]', "--ignore-unknown-fields"]
    more = ["--drafter", "none", "--dtype", "int8", "--tensor-parallel", "2", "--drain", "7"]
    assert run("--port", "0", *options, *more, *pages, SPECENGINE_API_KEY="from-the-environment").exit_code == 0
    settings = Settings(
        name="mine",
        drafters=("none", "suffix", "prompt_lookup"),
        rules=("typical:epsilon=0.1", "match", "rejection", "traversal"),
        hosts=("here",),
        allowed_origins=("http://a", "https://b:1", "*"),
        ignore_unknown_fields=True,
        api_key="from-the-environment",
        port=0,
        drain=7.0,
    )
    assert served == [(str(chat_folder()), "auto", "int8", 2, settings)]
