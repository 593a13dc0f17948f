"""A few hundred damaged inputs of every kind keep the contract; bench/fuzz.py tries more."""

from pathlib import Path
from random import Random

import pytest

from tests.fuzz.contract import Harness, violation
from tests.fuzz.harnesses import HARNESSES
from tests.selection import wide

COUNT = {"chat template": 35}  # of a range of inputs: each may take its second
# what a file says of tokens beyond its vocabulary, and of a head that differs from the embedding
pytestmark = pytest.mark.filterwarnings("ignore:.*it is not used", "ignore:.*tie_word_embeddings is true")
every_harness = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)


@every_harness
def test_an_intact_file_loads(harness: Harness, tmp_path):
    path = tmp_path / harness.filename
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(harness.seeds()[0])
    harness.use(path)


@every_harness
@pytest.mark.parametrize("inputs", wide([range(25), range(25, 250)]), ids=["25", "all others"])
def test_damaged_files_load_or_are_refused_by_name(harness: Harness, inputs: range, tmp_path):
    intact = harness.seeds()
    violation(harness, intact[0], tmp_path)  # what is loaded on first use is not counted
    for seed in inputs[: COUNT.get(harness.name)]:
        problem = violation(harness, harness.mutation(intact, Random(seed)), tmp_path)
        assert problem is None, f"input {seed}: {problem}"


@pytest.mark.parametrize(("times", "found"), [(1, None), (2, "took")])
def test_memory_that_a_second_try_takes_too_is_a_finding(times, found, tmp_path):
    """The other way round: what one try alone takes is the interpreter's."""
    tries = []

    def use(_: Path) -> None:
        tries.append(bytes(8 << 20) if len(tries) < times else b"")

    problem = violation(Harness("once", lambda: [b""], use, ("file",), "file"), b"", tmp_path)
    assert problem is None if found is None else problem.startswith(found)
