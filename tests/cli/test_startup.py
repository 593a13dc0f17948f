"""The command line starts without torch, which takes seconds to import."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "fastapi", "matplotlib"}
COMMANDS = ("generate", "chat", "serve", "models", "train", "corpus", "report")
PROGRAM = """
import sys
from typer.testing import CliRunner
from specengine.cli.main import app
for arguments in {runs!r}:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
print(*{{name.partition(".")[0] for name in sys.modules}})
"""


def heavy_imports(*runs: list[str]) -> set[str]:
    """Heavy packages that a process has imported after these runs of the command line."""
    command = [sys.executable, "-c", PROGRAM.format(runs=runs)]
    return HEAVY & {*subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()}


def test_help_and_the_list_of_models_load_no_torch():
    helps = [[command, "--help"] for command in COMMANDS]
    assert heavy_imports(["--help"], *helps, ["models", "--json"]) == set()


@pytest.mark.full
def test_a_command_that_runs_a_model_loads_torch():
    assert "torch" in heavy_imports(["generate", "3 4", "--model", "random:tiny-llama", "--max-new-tokens", "1"])
