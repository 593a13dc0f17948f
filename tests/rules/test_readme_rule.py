"""The worked examples of a new rule, in the README and in docs/adding-your-own.md: built as they stand, and run."""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import ModuleType

import pybind11
import pytest
import torch

from specengine import SamplingParams, rules
from specengine.ops.verify_tree import SamplingTable, verify_tree
from specengine.rules import Rule, parse_rule
from specengine.tree import DraftTree, TreeBatch
from tests.backends import use_core
from tests.engines import tiny_engine
from tests.ops.verifying import CPU, PARAMS, history_of, make_batch

ROOT = Path(__file__).resolve().parents[2]
README, PAGE = "README.md", "docs/adding-your-own.md"
PROBABLE = [0.5, 0.3, 0.2]  # of tokens 0, 1, 2: 1 is near the best one at share = 0.5, 2 is not


def example(page: str) -> dict[str, str]:
    """A page's fenced blocks that follow a line with the name of a file, by that name."""
    blocks = re.findall(r"^`([\w/.]+)`:[^\n]*\n\n```\w+\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    return dict(blocks)


def add_lines(header: Path, lines: str) -> None:
    """An example's include beside the other includes, its other line beside the other rules."""
    include, rule = lines.splitlines()
    text = header.read_text()
    for line, before in ((include, '#include "rules/rejection.h"'), (rule, '  if (is("rejection", 0))')):
        assert text.count(before) == 1
        text = text.replace(before, f"{line}\n{before}")
    header.write_text(text)


def build(csrc: Path, folder: Path) -> Path:
    """The extension `_readme` from the sources in csrc, for one instruction set and quick to compile."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    options = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi"]
    options += [f"-I{path}" for path in (csrc, pybind11.get_include(), sysconfig.get_path("include"))]
    options += ["-DSPECENGINE_ISA=portable", "-DSPECENGINE_MODULE=_readme", '-DSPECENGINE_COMPILER="any"']
    options += ["-DSPECENGINE_OPS_ONLY"]

    def compiled(source: Path) -> str:
        run(compiler, *options, "-c", str(source), "-o", str(folder / f"{source.stem}.o"))
        return str(folder / f"{source.stem}.o")

    sources = [path for part in (".", "base", "cpu") for path in sorted((csrc / part).glob("*.cpp"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    run(compiler, "-shared", "-pthread", *objects, "-o", str(folder / "_readme.so"))
    return folder / "_readme.so"


def run(*command: str) -> None:
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}"


def load(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> ModuleType:
    """The core with both rules in it."""
    folder = tmp_path_factory.mktemp("readme_rule")
    csrc = shutil.copytree(ROOT / "csrc", folder / "csrc")
    for page, name in ((README, "near"), (PAGE, "likely")):
        blocks = example(page)
        (csrc / "rules" / f"{name}.h").write_text(blocks[f"csrc/rules/{name}.h"])
        add_lines(csrc / "rules" / "rules.h", blocks["csrc/rules/rules.h"])
    return load("_readme", build(csrc, folder))


@pytest.fixture
def near(core, monkeypatch, tmp_path) -> type[Rule]:
    """The README's dataclass, registered, over that core."""
    use_core(core, monkeypatch)
    return registered(README, "near", monkeypatch, tmp_path)


@pytest.fixture
def likely(core, monkeypatch, tmp_path) -> type[Rule]:
    """The page's dataclass, registered, over that core."""
    use_core(core, monkeypatch)
    return registered(PAGE, "likely", monkeypatch, tmp_path)


def registered(page: str, name: str, monkeypatch, folder: Path) -> type[Rule]:
    path = folder / f"{name}.py"
    path.write_text(example(page)[f"specengine/rules/{name}.py"])
    kind = getattr(load(name, path), name.capitalize())
    monkeypatch.setitem(rules.RULES, name, kind)
    return kind


def accepted(rule: Rule, children: list[int], params: SamplingParams) -> tuple[list[int], int, int]:
    """(accepted tokens, bonus token, relaxed) of a root with these children, every node's target being PROBABLE."""
    tree = TreeBatch.of([DraftTree([0, *children], [-1, *[0] * len(children)])], CPU)
    logits = torch.tensor(PROBABLE).log().repeat(1 + len(children), 1)
    out = verify_tree(logits, tree, SamplingTable.of([params], [params.seed]), history_of([[0]], [0]), rule=rule)
    path = out.path[0, 1 : int(out.path_length)].tolist()
    return tree.tokens[path].tolist(), int(out.bonus), int(out.relaxed)


@pytest.mark.parametrize(
    ("share", "children", "expected"),
    [
        (0.5, [1], ([1], 0, 1)),
        (0.5, [2, 1], ([1], 0, 1)),
        (0.5, [1, 0], ([0], 0, 0)),
        (0.5, [2], ([], 0, 0)),
        (0.3, [2, 1], ([2], 0, 1)),
        (0.7, [1], ([], 0, 0)),
    ],
)
def test_the_example_accepts_what_is_near_the_best_token_and_prefers_the_target_s_own(near, share, children, expected):
    assert accepted(near(share), children, SamplingParams()) == expected


def test_the_example_honours_filters(near):
    assert accepted(near(0.5), [1], SamplingParams(temperature=1.0, top_k=1)) == ([], 0, 0)


@pytest.mark.parametrize(
    ("least", "children", "expected"),
    [
        (0.25, [2, 1], ([1], 1)),
        (0.15, [2, 1], ([1], 1)),
        (0.15, [2], ([2], 1)),
        (0.25, [2], ([], 0)),
        (0.25, [1, 0], ([0], 0)),
    ],
)
def test_the_page_s_example_accepts_the_likeliest_child_of_enough_probability(likely, least, children, expected):
    seeds = (SamplingParams(temperature=1.0, seed=seed) for seed in count())
    params = next(p for p in seeds if accepted(likely(1.0), [0], p)[0] == [0])  # the target draws token 0
    tokens, _, relaxed = accepted(likely(least), children, params)
    assert (tokens, relaxed) == expected


def test_the_page_s_example_is_exact_at_temperature_0(likely):
    assert accepted(likely(0.0), [1, 2], SamplingParams()) == ([], 0, 0)


@pytest.mark.parametrize("example_rule", ["near", "likely"])
def test_the_example_is_match_at_its_neutral_parameter(request, example_rule):
    kind, relaxed = request.getfixturevalue(example_rule), 0
    for seed, params in enumerate(list(PARAMS.values()) * 4):
        batch = make_batch([[-1, 0, 0, 1, 1, 2], [-1], [-1, 0, 1], [-1, *[0] * 9]], [params] * 4, 40, seed=seed)
        out, exact = (verify_tree(*batch.arguments(), rule=rule) for rule in (kind().neutral, parse_rule("match")))
        assert all(torch.equal(getattr(out, name), getattr(exact, name)) for name in vars(out))
        relaxed += int(verify_tree(*batch.arguments(), rule=kind()).relaxed.sum())
    assert relaxed > 0, "the cases must tell the two apart"


def test_the_example_s_spec_reaches_the_engine(near):
    assert parse_rule("near:share=0.25") == near(0.25) and parse_rule("near") == near(0.5)
    for wrong in ("near:share=1.5", "near:shares=1"):
        with pytest.raises(ValueError, match="share"):
            parse_rule(wrong)
    prompts, params = [[1, 2, 3, 1, 2, 3, 1, 2], [5] * 6], SamplingParams(max_new_tokens=24)
    texts = {}
    for spec in ("match", "near:share=1", "near:share=0"):
        outputs = tiny_engine(rule=spec).generate(prompts, params)
        texts[spec] = [output.token_ids for output in outputs]
        assert all(output.stats.lossless == (spec == "match") for output in outputs)
    assert texts["near:share=1"] == texts["match"] != texts["near:share=0"]
