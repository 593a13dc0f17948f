"""What a start imports: the command line no torch, and an engine only what its model needs."""

import subprocess
import sys
from dataclasses import replace

import pytest

from specengine.models.presets import PRESETS
from tests.models.files import random_state
from tests.models.gguf_blocks import Type, random_blocks
from tests.models.gguf_files import write_gguf

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


# Readers of other files, and what only servers, training, constraints and downloads need.
UNUSED = {"gguf", "transformers", "sentencepiece", "mistral_common", "huggingface_hub", "requests", "filelock", "rich"}
UNUSED |= {"pydantic", "fastapi", "typer", "llguidance", "jsonschema", "scipy", "networkx", "matplotlib", "ray"}
ENGINE = """
import sys
import torch
before = {{*sys.modules}}
from specengine import Engine, SamplingParams
for model in {models!r}:
    engine = Engine(model)
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, temperature=0))
print(*{{name.partition(".")[0] for name in {{*sys.modules}} - before}})
"""


def engine_imports(*models: str) -> set[str]:
    """Packages that a process has imported after it generated with these models, beyond those of torch."""
    command = [sys.executable, "-c", ENGINE.format(models=models)]
    return {*subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()}


def test_an_engine_imports_only_what_its_model_needs(smollm2_path):
    imported = engine_imports(str(smollm2_path), "random:tiny-llama")
    assert "specengine" in imported and not imported & UNUSED


def test_blocks_that_the_core_does_not_unpack_import_the_gguf_package(tmp_path):
    config = replace(PRESETS["tiny-llama"], hidden_size=256, num_layers=1)
    state = random_state(config)
    name = "model.layers.0.mlp.gate_proj.weight"
    state[name] = (random_blocks("IQ2_S", tuple(state[name].shape)), Type["IQ2_S"])
    assert "gguf" in engine_imports(str(write_gguf(tmp_path / "m.gguf", config, state)))
