"""The worked example of a new rule in docs/adding-your-own.md, built as printed and run."""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from types import ModuleType

import pybind11
import pytest
import torch

from specengine import SamplingParams, rules
from specengine.draft_trees.tree import DraftTree, TreeBatch
from specengine.ops.sampling_table import SamplingTable
from specengine.ops.verify_tree import verify_tree
from specengine.rules import Rule, parse_rule
from tests.backends import use_core
from tests.engines import tiny_engine
from tests.ops.verifying import CPU, PARAMS, history_of, make_batch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/adding-your-own.md"
pytestmark = pytest.mark.docs

PROBABLE = [0.5, 0.3, 0.2]  # of tokens 0, 1, 2: 1 is near the best one at share = 0.5, 2 is not


def example() -> dict[str, str]:
    """Finds the page's fenced blocks by the file name in the line before."""
    blocks = re.findall(r"^`([\w/.]+)`:[^\n]*\n\n```\w+\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return dict(blocks)


def add_lines(header: Path, lines: str) -> None:
    """Inserts the example's include after the other includes, and its other line after the other rules."""
    include, rule = lines.splitlines()
    text = header.read_text()
    for line, before in ((include, '#include "rules/rejection.h"'), (rule, '  if (is("rejection", 0))')):
        assert text.count(before) == 1
        text = text.replace(before, f"{line}\n{before}")
    header.write_text(text)


def build(csrc: Path, folder: Path) -> Path:
    """Builds the extension `_example` from the sources in csrc, for one instruction set to compile fast."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    options = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi"]
    options += [f"-I{path}" for path in (csrc, pybind11.get_include(), sysconfig.get_path("include"))]
    options += ["-DSPECENGINE_ISA=portable", "-DSPECENGINE_MODULE=_example", '-DSPECENGINE_COMPILER="any"']
    options += ["-DSPECENGINE_OPS_ONLY"]

    def compiled(source: Path) -> str:
        run(compiler, *options, "-c", str(source), "-o", str(folder / f"{source.stem}.o"))
        return str(folder / f"{source.stem}.o")

    parts = (
        "bindings",
        "base",
        "cpu",
        "cpu/experts",
        "cpu/gated_delta",
        "cpu/growth",
        "cpu/linear",
        "cpu/lora",
        "cpu/passes",
        "growth",
        "networks",
    )
    pools = {"pools", "trees"}  # not among the ops
    sources = [path for part in parts for path in sorted((csrc / part).glob("*.cpp")) if path.stem not in pools]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sources))
    run(compiler, "-shared", "-pthread", *objects, "-o", str(folder / "_example.so"))
    return folder / "_example.so"


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
    """The core with the example rule."""
    folder = tmp_path_factory.mktemp("example_rule")
    csrc, blocks = shutil.copytree(ROOT / "csrc", folder / "csrc"), example()
    (csrc / "rules" / "likely.h").write_text(blocks["csrc/rules/likely.h"])
    add_lines(csrc / "rules" / "rules.h", blocks["csrc/rules/rules.h"])
    return load("_example", build(csrc, folder))


@pytest.fixture
def likely(core, monkeypatch, tmp_path) -> type[Rule]:
    """The page's dataclass, registered on that core."""
    use_core(core, monkeypatch)
    path = tmp_path / "likely.py"
    path.write_text(example()["specengine/rules/likely.py"])
    kind = load("likely", path).Likely
    monkeypatch.setitem(rules.RULES, "likely", kind)
    return kind


def accepted(rule: Rule, children: list[int], params: SamplingParams) -> tuple[list[int], int, int]:
    """Returns (accepted tokens, bonus token, relaxed) of a root with these children; every target is PROBABLE."""
    tree = TreeBatch.of([DraftTree([0, *children], [-1, *[0] * len(children)])], CPU)
    logits = torch.tensor(PROBABLE).log().repeat(1 + len(children), 1)
    out = verify_tree(logits, tree, SamplingTable.of([params], [params.seed]), history_of([[0]], [0]), rule=rule)
    path = out.path[0, 1 : int(out.path_length)].tolist()
    return tree.tokens[path].tolist(), int(out.bonus), int(out.relaxed)


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
def test_the_example_accepts_the_likeliest_child_of_enough_probability(likely, least, children, expected):
    seeds = (SamplingParams(temperature=1.0, seed=seed) for seed in count())
    params = next(p for p in seeds if accepted(likely(1.0), [0], p)[0] == [0])  # the target draws token 0
    tokens, _, relaxed = accepted(likely(least), children, params)
    assert (tokens, relaxed) == expected


def test_the_example_is_exact_at_temperature_0(likely):
    assert accepted(likely(0.0), [1, 2], SamplingParams()) == ([], 0, 0)


def test_the_example_honours_filters(likely):
    params = SamplingParams(temperature=1.0, top_k=1)
    assert accepted(likely(0.15), [1], params) == ([], 0, 0)


def test_the_example_is_match_at_its_neutral_parameter(likely):
    relaxed = 0
    for seed, params in enumerate(list(PARAMS.values()) * 4):
        batch = make_batch([[-1, 0, 0, 1, 1, 2], [-1], [-1, 0, 1], [-1, *[0] * 9]], [params] * 4, 40, seed=seed)
        out, exact = (verify_tree(*batch.arguments(), rule=rule) for rule in (likely().neutral, parse_rule("match")))
        assert all(torch.equal(getattr(out, name), getattr(exact, name)) for name in (f.name for f in fields(out)))
        relaxed += int(verify_tree(*batch.arguments(), rule=likely(0.02)).relaxed.sum())
    assert relaxed > 0, "the cases must tell the two apart"


def test_the_example_s_spec_reaches_the_engine(likely):
    assert parse_rule("likely:least=0.25") == likely(0.25) and parse_rule("likely") == likely(0.3)
    for wrong in ("likely:least=1.5", "likely:leasts=1"):
        with pytest.raises(ValueError, match="least"):
            parse_rule(wrong)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5] * 6]
    params = SamplingParams(max_new_tokens=24, temperature=0.8, seed=1)
    texts = {}
    for spec in ("match", "likely:least=1", "likely:least=0"):
        outputs = tiny_engine(rule=spec).generate(prompts, params)
        texts[spec] = [output.token_ids for output in outputs]
        assert all(output.stats.lossless == (spec == "match") for output in outputs)
    assert texts["likely:least=1"] == texts["match"] != texts["likely:least=0"]
