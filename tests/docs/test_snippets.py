"""Every command and every Python snippet of docs/ and of the README works as it stands there.

Blocks marked `<!-- not run: REASON -->` are read only: Python must compile, commands must parse. A page's Python
blocks share one namespace and run in the order of the page; a folder that a snippet calls path/to/X is made before.
"""

import functools
import linecache
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

import specengine.api
import specengine.bench.__main__ as bench
import specengine.bench.modes
import specengine.drafters.draft_model.small_model
import specengine.engine.engine
import specengine.tensor_parallel.loading
import specengine.train.command
from specengine.cli import main as cli
from specengine.drafters import drafter_kind
from specengine.rules import parse_rule
from specengine.tensor_parallel.loading import load_model
from specengine.train.objectives.registry import objective_class
from specengine.types import SamplingParams
from specengine.utils.spec_string import Spec
from tests.docs.pages import PAGES, README, Page, arguments, commands, is_ours
from tests.drafters.eagle_files import eagle1_state, write_drafter
from tests.models.files import write_chat_model

APPS = {"specengine": cli.app, "specengine.bench": bench.app}
USES_LOAD_MODEL = (
    *(
        specengine.api,
        specengine.engine.engine,
        specengine.tensor_parallel.loading,
        specengine.drafters.draft_model.small_model,
    ),
    *(specengine.bench.modes, specengine.train.command),
)
ALL = [Page(path) for path in (README, *PAGES)]
MOST_TOKENS = 24  # of an answer
SHELL = ("bash", "")  # the README does not name its blocks' language

UsageError = typer.BadParameter.__mro__[1]  # of the click that this typer has, which may be its own

pytestmark = pytest.mark.model
kept = functools.cache(load_model)


def loaded(name, **options):
    """load_model, which loads each model once; what is as by default does not make another one."""
    usual = {"device": "auto", "dtype": "auto", "strict": False, "tensor_parallel": 1, "ops": None}
    return kept(str(name), **{key: value for key, value in options.items() if value != usual[key]})


def of_each(*languages):
    return pytest.mark.parametrize(
        "page", [p for p in ALL if any(b.language in languages for b in p.blocks)], ids=lambda page: page.name
    )


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """A folder with what snippets name, one model for all of them, short answers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("The sea is blue and the sky is blue. " * 8, encoding="utf-8")
    (tmp_path / "path" / "to").mkdir(parents=True)
    write_chat_model(tmp_path / "path" / "to" / "model")
    monkeypatch.setattr(sys, "argv", ["specengine"])
    for module in USES_LOAD_MODEL:
        monkeypatch.setattr(module, "load_model", loaded)
    check = SamplingParams.__post_init__

    def check_and_cut(params: SamplingParams) -> None:
        check(params)
        object.__setattr__(params, "max_new_tokens", min(params.max_new_tokens, MOST_TOKENS))

    monkeypatch.setattr(SamplingParams, "__post_init__", check_and_cut)


@pytest.fixture
def eagle_folder(tmp_path):
    """path/to/eagle: random weights in EAGLE-1's layout for the embedded model, as none comes with the package."""
    config = loaded("smollm2-135m").config
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": 128,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }
    torch.manual_seed(3)
    return write_drafter(tmp_path / "path" / "to" / "eagle", shape, eagle1_state(shape))


def parse(words: list[str]) -> None:
    """Has the command's own parser read it, and its specs; nothing is run. What is missing may have been left out."""
    name, rest = arguments(words)
    rest = [word for word in rest if word not in ("--help", "--version")]
    if not rest:
        return
    command = typer.main.get_command(APPS[name])
    if hasattr(command, "resolve_command"):
        _, command, rest = command.resolve_command(typer.Context(command), rest)
    try:
        with command.make_context(name, list(rest)) as context:
            given = context.params
    except UsageError as error:
        if type(error).__name__ == "MissingParameter":
            return
        raise
    if command.name == "train":
        objective_class(given["drafter"])
    elif given.get("drafter"):
        parse_drafter(given["drafter"])
    if given.get("rule"):
        parse_rule(given["rule"])


def parse_drafter(text: str) -> None:
    """Refuses an option that the drafter, or a part of a combination, does not have."""
    spec = Spec.parse(text, "drafter")
    if spec.name == "auto":
        return
    spec.build(drafter_kind(spec.name).config_type, "drafter")
    for part in spec.path.split("+") if spec.name == "combine" else ():
        parse_drafter(part.replace(";", ","))


@of_each("python")
def test_the_python_snippets_of_a_page_run(page, eagle_folder, monkeypatch):
    module = ModuleType("snippet")
    monkeypatch.setitem(sys.modules, "snippet", module)  # where dataclasses look their annotations up
    for block in page.blocks:
        if block.language != "python":
            continue
        code, name = block.code, f"{page.name}:{block.line}"
        compiled = compile(code, name, "exec", dont_inherit=True)
        if block.reason is None:
            linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for tracebacks
            exec(compiled, vars(module))


@of_each("bash")
def test_the_commands_of_a_page_run(page, eagle_folder):
    runner = CliRunner()
    for block in page.blocks:
        if block.language != "bash" or block.reason is not None:
            continue
        for words in commands(block.code):
            assert is_ours(words), f"{page.name}:{block.line}: {words} is no command of this package: mark the block"
            name, rest = arguments(words)
            result = runner.invoke(APPS[name], rest)
            assert result.exit_code == 0, f"{page.name}:{block.line}: {words}\n{result.output}"


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_commands_that_are_not_run_parse_too(page):
    shell = [words for block in page.blocks if block.language in SHELL for words in commands_of(block.code)]
    inline = [
        words for span in page.spans if span.startswith(("specengine ", "python -m ")) for words in commands(span)
    ]
    own = {f"{Path(file).stem}:" for file in page.new_files}  # rules that the page shows how to make
    for words in (*shell, *inline):
        if is_ours(words) and not any(word.startswith(tuple(own)) for word in words):
            try:
                parse(words)
            except (UsageError, ValueError) as error:
                pytest.fail(f"{page.name}: {' '.join(words)}: {error}")


def commands_of(code: str) -> list[list[str]]:
    """The commands of a block that may hold anything else, too: the README's have output and file lists. What torchrun
    starts several times is a command of its own."""
    try:
        found = commands(code.replace("&&", "\n"))
    except ValueError:  # no shell: an apostrophe in a text
        return []
    module = "specengine.cli.main"
    return [["specengine", *words[words.index(module) + 1 :]] if module in words else words for words in found]


@pytest.mark.parametrize(
    "text",
    [
        "specengine generate hello --max-tokens 5",
        "specengine write hello",
        "specengine generate hello --drafter eagle3,depth=7",
        "specengine generate hello --drafter 'combine:suffix+eagle3;depth=7'",
        "specengine generate hello --drafter combine:suffix+eagle3;levels=5",  # the shell would cut it
        "specengine generate hello --rule margin:alpha=0.9",
        "specengine train --drafter medusa,levels=5 --out somewhere",
        "python -m specengine.bench --drafter none",
        "torchrun --nproc-per-node 2 -m specengine.cli.main train --drafters medusa --out somewhere",
    ],
)
def test_a_command_with_what_does_not_exist_is_noticed(text):
    (words,) = commands_of(text)
    assert is_ours(words)
    with pytest.raises((UsageError, ValueError)):
        parse(words)


def test_blocks_that_are_not_run_say_why():
    for page in ALL:
        for block in page.blocks:
            assert block.reason is None or len(block.reason) > 5, f"{page.name}:{block.line}"
