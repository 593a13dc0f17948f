"""Scripts with public clients run against a server of SmolLM2, each in an interpreter that has its client.

`SPECENGINE_CLIENTS` names folders of interpreters, separated by `:`; without it, the tests' own interpreter is asked.
A script `NAME_client.py` gets the server's address as its argument, and fails by an exception.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.servers import command

pytestmark = [pytest.mark.full, pytest.mark.model]
SCRIPTS = sorted(Path(__file__).parent.glob("*_client.py"))
INTERPRETERS = [f"{folder}/bin/python" for folder in os.environ.get("SPECENGINE_CLIENTS", "").split(":") if folder]
SECONDS = 300  # of one script


@pytest.fixture(scope="module")
def address(smollm2_path):
    with command("--model", str(smollm2_path), "--name", "smollm2-135m", "--device", "cpu") as (address, _):
        yield address


@functools.cache
def interpreter_with(module: str) -> str | None:
    """Returns the first interpreter that has a module."""
    asked = [sys.executable, *INTERPRETERS]
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return next((each for each in asked if subprocess.run([each, "-c", code], check=False).returncode == 0), None)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_public_client_gets_what_it_asks_for(address, script):
    name = script.stem.removesuffix("_client")
    interpreter = interpreter_with(name)
    if interpreter is None:
        pytest.skip(f"no interpreter has the client {name}; see tests/server/clients/test_clients.py")
    environment = {**os.environ, "PYTHONPATH": ""}
    words = [interpreter, str(script), address]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
